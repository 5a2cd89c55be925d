"""Slurm's prolog and epilog: the scripts as Slurm calls them, against an agent."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_shim import FakeShim
from held_agent import HeldAgent, uuid_of

from cotenant.agent.owners.slurm import end, spec_of, start, task_lines
from cotenant.core.errors import InputError, WorkError

SCRIPTS = Path(__file__).resolve().parents[2] / "deploy" / "slurm"
JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_UID": str(os.getuid()), "SLURM_JOB_GPUS": "0"}
ASKS = JOB | {"SLURM_JOB_COMMENT": "nightly cotenant:request=30%,limit=60%,memory=2GiB"}


@pytest.fixture
def agent() -> Iterator[HeldAgent]:
    found = HeldAgent(Path(tempfile.mkdtemp(prefix="cot-")), count=2)
    yield found
    found.close()


@pytest.fixture
def run(agent: HeldAgent, tmp_path: Path) -> Any:
    """Runs a script as Slurm does: no search path, only Slurm's variables."""
    tool = tmp_path / "cotenant"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m cotenant.cli.main "$@"\n')
    tool.chmod(0o755)
    source = str(Path(__file__).resolve().parents[2] / "src")

    def call(script: str, environment: dict[str, str], **more: str) -> subprocess.CompletedProcess[str]:
        own = {"COTENANT_PATH": f"{tmp_path}:/usr/bin:/bin", "COTENANT_DIR": str(agent.folder), "PYTHONPATH": source}
        return subprocess.run(
            [SCRIPTS / script], env=environment | own | more, capture_output=True, text=True, timeout=60, check=False
        )

    return call


def tenants(agent: HeldAgent) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in agent.call("list")["tenants"]}


def test_a_jobs_share_from_prolog_to_epilog(agent: HeldAgent, run: Any) -> None:
    done = run("prolog.sh", ASKS)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"cotenant slurm: slurm-4711 has 30% of {uuid_of(0)}\n"
    row = tenants(agent)["slurm-4711"]
    assert (row["request"], row["limit"], row["gpus"][0]["memory_limit_bytes"]) == (0.3, 0.6, 2 << 30)
    assert row["gpus"][0]["uuid"] == uuid_of(0)

    agent.put("0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0\n")
    shim = FakeShim(agent.tenants)
    assert shim.answer["tenant"].rstrip(b"\0") == b"slurm-4711", "its processes are known by their cgroup"
    shim.close()

    assert run("epilog.sh", JOB).returncode == 0
    assert tenants(agent) == {}
    end(JOB, agent.folder)  # twice does no harm


def test_tasks_are_started_with_the_shim(agent: HeldAgent, run: Any) -> None:
    start(ASKS, agent.folder)
    done = run("task_prolog.sh", ASKS)
    if done.returncode == 2 and "C compiler" in done.stderr:
        pytest.skip("the shim cannot be built here")
    assert done.returncode == 0, done.stderr
    lines = dict(line.removeprefix("export ").split("=", 1) for line in done.stdout.splitlines())
    assert all(line.startswith("export ") for line in done.stdout.splitlines()), "as Slurm reads it"
    assert "libcotenant-shim.so" in lines["LD_PRELOAD"]
    assert lines["COTENANT_SOCKET"] == str(agent.tenants / "agent.sock")
    assert FakeShim(agent.tenants, lines["COTENANT_TOKEN"]).answer["tenant"].rstrip(b"\0") == b"slurm-4711"


def test_a_job_that_asks_for_nothing_is_left_alone(agent: HeldAgent, run: Any) -> None:
    remark = JOB | {"SLURM_JOB_COMMENT": "just a remark"}
    done = run("task_prolog.sh", remark)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert start(remark, agent.folder) == ""
    end(remark, agent.folder)
    assert tenants(agent) == {}


@pytest.mark.parametrize(
    ("comment", "sentence"),
    [
        ("cotenant:request=70%,limit=60%", "slurm-4711 asks for 70%, over its own limit of 60%"),
        ("cotenant:request=lots", "'lots' is not a quantity"),
        ("cotenant:requets=30%", "'requets' is not known; did you mean request?"),
        ("cotenant:request=30%,request=40%", "'request' is there twice"),
        ("cotenant:request", "'request' is not KEY=VALUE"),
        ("cotenant:request=1% cotenant:request=2%", "cotenant: is there twice"),
        ("cotenant:priority=high", "'high' is not a whole number"),
        ("cotenant:memory=8", "'8' has no unit; write 8GiB"),
        ("cotenant:memory=64GiB", "has 8.00 GiB of memory left to promise"),
    ],
)
def test_a_wrong_request_ends_the_jobs_tasks_and_not_the_node(agent: HeldAgent, comment: str, sentence: str) -> None:
    job = JOB | {"SLURM_JOB_COMMENT": comment}
    assert sentence in start(job, agent.folder), "said, and no error: that would drain the node"
    with pytest.raises(InputError) as refused:
        task_lines(job, agent.folder)
    assert sentence in str(refused.value)
    end(job, agent.folder)
    assert not list(agent.folder.glob("*.refused"))


def test_an_agent_that_is_away_is_the_nodes_affair(agent: HeldAgent, run: Any) -> None:
    agent.kill()
    done = run("prolog.sh", ASKS)
    assert done.returncode == 1
    assert "no agent answers" in done.stderr
    end(JOB, agent.folder)
    with pytest.raises(WorkError, match="this is run by Slurm as Prolog, TaskProlog or Epilog"):
        start({}, agent.folder)


def test_gpus_are_those_that_slurm_gave() -> None:
    spec = spec_of(ASKS | {"SLURM_JOB_GPUS": "0,1"})
    assert spec is not None
    assert (spec.gpus, spec.gpu_count, spec.request, spec.limit) == (("0", "1"), 2, 0.3, 0.6)
    assert spec_of(JOB) is None
    with pytest.raises(InputError, match="over 100%"):
        spec_of(JOB | {"SLURM_JOB_COMMENT": "cotenant:request=300%"})
