"""Slurm itself, one node on loopback: what jobs get by their comments, and what happens when something is away."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_node import LONG_S, SlurmNode, missing
from waiting import wait_for as wait_for_s

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here"), pytest.mark.slow,
              pytest.mark.timeout(900)]  # fmt: skip

ASKS = "--comment=nightly cotenant:request=20%,memory=1GiB"
SHOW = 'echo "preload $LD_PRELOAD"'
SHIM = "libcotenant-shim.so"


def wait_for(check: Callable[[], Any], what: str = "") -> None:
    """Wait as long as Slurm may take."""
    wait_for_s(check, LONG_S, what)


@pytest.fixture(scope="module")
def node() -> Iterator[SlurmNode]:
    found = SlurmNode(Path(tempfile.mkdtemp(prefix="cot-")))
    yield found
    found.close()


def test_every_task_of_a_job_has_the_share_that_its_comment_asks_for(node: SlurmNode) -> None:
    out = node.run(f"{SHOW}; srun -n2 --overlap sh -c '{SHOW}'", ASKS, "-n2")
    assert out.count(SHIM) == 3, out
    wait_for(lambda: not node.held())
    array = node.submit(SHOW, ASKS, "--array=1-2", "-o", str(node.folder / "array.%a"))
    node.ended(array)
    assert all(SHIM in (node.folder / f"array.{i}").read_text() for i in (1, 2))
    assert SHIM in node.call("srun", "--gres=gpu:1", ASKS, "sh", "-c", SHOW)
    wait_for(lambda: not node.held())


def test_a_job_that_asks_for_nothing_gets_nothing(node: SlurmNode) -> None:
    assert node.run(SHOW, "--comment=a remark") == "preload \n"
    assert node.run(SHOW, "--export=ALL,COTENANT_DIR=/nowhere") == "preload \n"


def test_another_users_job_has_its_share(node: SlurmNode) -> None:
    if not node.for_all_users:
        pytest.skip("no Python here is for other users")
    out = node.run(f"{SHOW}; id -u", ASKS, "--uid=65534", "--export=ALL,COTENANT_DIR=/nowhere", "-D", "/tmp")
    assert SHIM in out
    assert "65534" in out


@pytest.mark.parametrize(
    ("comment", "sentence"),
    [
        ("cotenant:requets=30%", "'requets' is unknown; did you mean request?"),
        ("Cotennat:request=30%", "does not begin with cotenant:"),
        ("cotenant:memory=64GiB", "of memory left to promise"),
    ],
)
def test_a_refusal_is_in_the_output_and_the_node_goes_on(node: SlurmNode, comment: str, sentence: str) -> None:
    out = node.run("echo started", f"--comment={comment}")
    assert "cotenant: " in out
    assert sentence in out
    assert "started" not in out
    wait_for(lambda: node.state() == "idle")
    assert not list(node.agent.folder.glob("*.job"))


def test_a_share_lasts_from_the_prolog_to_scancel_whatever_restarts(node: SlurmNode) -> None:
    job = node.submit(f"{SHOW}; sleep 300", ASKS)
    name = f"slurm-{job}"
    wait_for(lambda: SHIM in node.output(job))
    node.restart_slurmd()
    node.agent.kill()
    node.agent.start()
    assert name in node.held()
    node.call("scancel", job)
    wait_for(lambda: not node.held())


def test_a_job_that_ends_while_the_agent_is_away_is_let_go(node: SlurmNode) -> None:
    job = node.submit(f"{SHOW}; sleep 300", ASKS)
    wait_for(lambda: SHIM in node.output(job))
    node.agent.kill()
    node.call("scancel", job)
    node.ended(job)
    node.agent.start()
    wait_for(lambda: not node.held())
    wait_for(lambda: node.state() == "idle", what="its epilog has not failed")


def test_a_requeued_job_is_admitted_again(node: SlurmNode) -> None:
    job = node.submit(f"{SHOW}; sleep 300", ASKS, "--requeue", "--open-mode=append")
    wait_for(lambda: node.output(job).count(SHIM) == 1)
    node.call("scontrol", "requeue", job)
    wait_for(lambda: node.output(job).count(SHIM) == 2)
    assert node.held() == {f"slurm-{job}"}
    node.call("scancel", job)
    wait_for(lambda: not node.held())


def test_without_an_agent_the_job_waits_until_it_is_released(node: SlurmNode) -> None:
    node.agent.kill()
    job = node.submit(SHOW, ASKS)
    # the node is drained before the job is back in the queue
    wait_for(lambda: "drain" in node.state() and node.held_back(job))
    assert SHIM not in node.output(job)
    node.agent.start()
    node.call("scontrol", "update", "nodename=localhost", "state=resume")
    node.call("scontrol", "release", job)
    wait_for(lambda: SHIM in node.output(job))
    node.ended(job)
    wait_for(lambda: not node.held())


def test_a_drained_node_keeps_the_shares_of_its_jobs_until_they_end(node: SlurmNode) -> None:
    job = node.submit(f"{SHOW}; sleep 300", ASKS)
    wait_for(lambda: SHIM in node.output(job))
    node.call("scontrol", "update", "nodename=localhost", "state=drain", "reason=test")
    assert node.held() == {f"slurm-{job}"}
    node.call("scancel", job)
    wait_for(lambda: not node.held() and node.state() == "drained")
    node.call("scontrol", "update", "nodename=localhost", "state=resume")
    assert SHIM in node.run(SHOW, ASKS)
