"""One suite over both executors: what a node must do with orders, and what it must never do."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet_orders import PYTHON, Node
from waiting import stays, wait_for

from cotenant.fleet.executors.base import Executor
from cotenant.fleet.executors.local import LocalExecutor
from cotenant.fleet.noderuntime import attempt as pages
from cotenant.fleet.nodes import NodeGpu, NodeSpec, pretend_nodes

EPOCHS = itertools.count(1)
NODES = pretend_nodes(2, 2, "A100-40GB", 40 << 30, 6.0, 125 * 10**9)


@pytest.fixture(
    scope="module", params=[pytest.param("local"), pytest.param("ray", marks=[pytest.mark.extras, pytest.mark.slow])]
)
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "local":
        made: Executor = LocalExecutor(folder, NODES)
    else:
        pytest.importorskip("ray")
        from cotenant.fleet.executors.on_ray import RayExecutor

        made = RayExecutor(folder, NODES, None)
    yield made
    made.shutdown()


@pytest.fixture
def node(executor: Executor, tmp_path: Path) -> Node:
    return Node(executor, tmp_path, next(EPOCHS))


def test_members_are_the_nodes_as_described(executor: Executor) -> None:
    members = executor.members()
    assert sorted(members) == ["node-0", "node-1"]
    assert members["node-1"].gpus == NODES[1].gpus
    assert members["node-1"].cpus == 6.0


def test_a_job_runs_in_its_environment_and_its_exit_and_output_are_kept(node: Node) -> None:
    name = node.start("sh", "-c", "echo $FROM_JOB $COTENANT_JOB $COTENANT_ATTEMPT $COTENANT_CPUS $COTENANT_GPUS; pwd")
    exit_ = node.ended(name)
    assert (exit_["code"], exit_["asked"], exit_["oom"]) == (0, "", False)
    said = node.log(name).split("\n")
    assert said[0] == f"yes {name.removesuffix('.0')} 0 3 node-0-gpu-0"
    assert said[1] == str(node.folder)


@pytest.mark.parametrize(("script", "code"), [("exit 3", 3), ("kill -9 $$", 137), ("kill -TERM $$", 143)])
def test_exit_codes_are_those_of_a_shell(node: Node, script: str, code: int) -> None:
    assert node.ended(node.start("sh", "-c", script))["code"] == code


def test_a_program_that_is_not_there_is_one_sentence(node: Node) -> None:
    exit_ = node.ended(node.start("/no/such/program"))
    assert exit_["error"] == "/no/such/program: cannot be started: no such file or directory"
    assert exit_["started"] is False
    assert node.ended(node.start("no-such-program"))["error"].startswith("no-such-program: cannot be started")


def test_the_same_order_twice_starts_one_process(node: Node) -> None:
    order = node.order("twice", ("sh", "-c", f"echo x >> {node.folder}/count; sleep 600"))
    assert node.exchange(order, order)["results"] == [{}, {}]
    node.exchange(order)
    node.up("twice.0")
    wait_for((node.folder / "count").exists)
    stays(lambda: (node.folder / "count").read_text() in ("", "x\n"))
    node.exchange({"do": "stop", "attempt": "twice.0", "why": "cancel", "grace_s": 0.0})
    node.ended("twice.0")


def test_a_start_that_comes_after_its_lease_starts_nothing(node: Node) -> None:
    """It was held up in the network while the job was given to another node."""
    order = node.order("late", ("touch", f"{node.folder}/ran"), lease_s=-0.001)
    (result,) = node.exchange(order)["results"]
    assert result == {"error": "the order to start arrived after the end of the lease"}
    assert node.report("late.0") is None
    assert not (node.folder / "ran").exists()


def test_an_older_controller_is_refused_and_starts_nothing(node: Node, executor: Executor) -> None:
    node.exchange()
    old = Node(executor, node.folder, node.epoch - 1)
    order = node.order("old", ("touch", f"{node.folder}/ran"))
    answer = old.exchange(order)
    assert answer["refused"] == node.epoch
    assert answer["results"] == []
    stays(lambda: not (node.folder / "ran").exists())
    assert node.report("old.0") is None


def test_a_stop_is_sigterm_then_after_the_grace_sigkill(node: Node) -> None:
    polite = node.start("sh", "-c", "trap 'echo bye; exit 75' TERM; echo set; while :; do sleep 0.05; done")
    stubborn = node.start("sh", "-c", "trap '' TERM; echo set; while :; do sleep 0.05; done", grace_s=0.5)
    for name in (polite, stubborn):
        node.up(name)
        _until_log(node, name, "set")
    node.exchange(*({"do": "stop", "attempt": name, "why": "preempt"} for name in (polite, stubborn)))
    first, second = node.ended(polite), node.ended(stubborn)
    assert (first["code"], first["asked"], node.log(polite)) == (75, "stop", "set\nbye\n")
    assert (second["code"], second["asked"], second["killed"]) == (137, "stop", True)
    assert first["killed"] is False


def test_helpers_of_a_job_are_not_signalled_before_it_has_left(node: Node) -> None:
    """A data loader that dies of the SIGTERM would take the checkpoint with it."""
    script = (
        "import signal, subprocess, sys, time\n"
        "child = subprocess.Popen(['sh', '-c', 'trap \"echo hit; exit 1\" TERM; while :; do sleep 0.05; done'])\n"
        "def leave(*_):\n"
        "    time.sleep(0.3)\n"
        "    print('helper lives', child.poll() is None, flush=True)\n"
        "    child.kill(); child.wait()\n"
        "    sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )
    name = node.start(PYTHON, "-c", script)
    _until_log(node, name, "ready")
    node.exchange({"do": "stop", "attempt": name, "why": "preempt"})
    assert node.ended(name)["code"] == 75
    assert node.log(name) == "ready\nhelper lives True\n"


def test_a_lease_that_nobody_extends_ends_the_job(node: Node) -> None:
    name = node.start("sleep", "600", lease_s=0.6)
    exit_ = node.ended(name)
    assert exit_["asked"] == "lease"


def test_an_extended_lease_goes_on_without_a_restart(node: Node) -> None:
    name = node.start("sh", "-c", "echo once; sleep 600", lease_s=4.0)
    first_ns = node.exchange()["now_ns"] + 4 * 10**9
    until_ns = first_ns + 600 * 10**9
    node.exchange({"do": "extend", "attempts": [name], "until_ns": until_ns})
    wait_for(lambda: node.exchange()["now_ns"] > first_ns, what="the end of the first lease")
    wait_for(lambda: node.log(name) == "once\n")
    report = node.report(name)
    assert report is not None
    assert report["phase"] == pages.RUNNING
    lease = json.loads((node.folder / "jobs" / name.removesuffix(".0") / "lease-0.json").read_text())
    assert lease["until_s"] == pytest.approx(until_ns / 1e9)
    node.exchange({"do": "stop", "attempt": name, "why": "cancel", "grace_s": 0.0})
    node.ended(name)


def test_nothing_that_a_job_started_outlives_it(node: Node) -> None:
    hidden = f"setsid sh -c 'echo $$ > {node.folder}/pid; sleep 600' & "
    hidden += f"while [ ! -s {node.folder}/pid ]; do sleep 0.05; done"
    exit_ = node.ended(node.start("sh", "-c", hidden))
    assert exit_["code"] == 0
    pid = int((node.folder / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_ranks_start_together_and_one_that_fails_takes_the_rest_with_it(node: Node) -> None:
    others = "while [ ! -e r0 ] || [ ! -e r2 ]; do sleep 0.05; done; exit 4"
    script = f"echo rank $RANK; touch r$RANK; if [ $RANK = 1 ]; then {others}; fi; sleep 600"
    name = node.start("sh", "-c", script, ranks=3, grace_s=0.5)
    exit_ = node.ended(name)
    assert exit_["code"] == 4
    assert set(exit_["codes"]) == {"0", "1", "2"}
    assert [node.log(name, rank) for rank in range(3)] == [f"rank {rank}\n" for rank in range(3)]


def test_a_killed_runner_takes_its_job_along_and_the_node_says_so(node: Node) -> None:
    name = node.start("sh", "-c", f"echo $$ > {node.folder}/pid; sleep 60")
    node.up(name)
    _until_log(node, name, "", path=node.folder / "pid")
    runner = _runner_of(int((node.folder / "pid").read_text()))
    os.kill(runner, signal.SIGKILL)
    exit_ = node.ended(name)
    assert exit_["lost"] is True
    assert exit_["error"] == "the job's runner was killed"
    pid = int((node.folder / "pid").read_text())
    wait_for(lambda: not _alive(pid))


def test_a_resize_reaches_the_lease_without_a_restart(node: Node) -> None:
    name = node.start("sleep", "60")
    node.up(name)
    node.exchange({"do": "resize", "attempt": name, "cpus": 1.5, "memory_bytes": 10**9})
    lease = json.loads((node.folder / "jobs" / name.removesuffix(".0") / "lease-0.json").read_text())
    assert (lease["cpus"], lease["memory_bytes"], lease["stop"]) == (1.5, 10**9, False)
    report = node.report(name)
    assert report is not None
    assert (report["cpus"], report["memory_bytes"], report["phase"]) == (1.5, 10**9, pages.RUNNING)
    node.exchange({"do": "stop", "attempt": name, "why": "cancel", "grace_s": 0.0})
    node.ended(name)


def test_ended_attempts_are_reported_until_they_are_to_be_forgotten(node: Node) -> None:
    name = node.start("true")
    node.ended(name)
    assert node.report(name) is not None
    node.exchange({"do": "forget", "attempts": [name]})
    assert node.report(name) is None


def test_one_bad_order_does_not_lose_the_others(node: Node) -> None:
    answer = node.exchange(
        {"do": "resize"}, {"do": "nonsense"}, node.order("good", ("true",)), {"do": "stop", "attempt": "unknown.7"}
    )
    errors = ["error" in result for result in answer["results"]]
    assert errors == [True, True, False, False]
    assert node.ended("good.0")["code"] == 0


def test_logs_are_read_in_pieces_and_from_the_end(node: Node, executor: Executor) -> None:
    name = node.start("printf", "0123456789")
    node.ended(name)
    path = str(node.folder / "jobs" / name.removesuffix(".0") / "log-0-0.txt")
    assert executor.read_log("node-0", path, 4) == (b"456789", 10)
    assert executor.read_log("node-0", path, -3) == (b"789", 10)
    assert executor.read_log("node-0", path, 10) == (b"", 10)
    assert executor.read_log("node-0", path + "x", 0) == (b"", 0)


# -- what only this machine's own nodes do -----------------------------------------------------------------------------


def _local(tmp_path: Path, **spec: object) -> Node:
    gpus = (NodeGpu("node-0-gpu-0", "A100-40GB", 40 << 30),)
    values: dict[str, object] = {"cpus": 2.0, "memory_bytes": 10**10, "gpus": gpus}
    return Node(LocalExecutor(tmp_path, [NodeSpec("node-0", **(values | spec))]), tmp_path, 1)  # type: ignore[arg-type]


def test_the_next_executor_finds_the_jobs_of_the_last(tmp_path: Path) -> None:
    node = _local(tmp_path)
    name = node.start("sh", "-c", "echo once; sleep 1; exit 5")
    node.up(name)
    node.executor.close()
    again = _local(tmp_path)
    again.epoch = 2
    assert again.report(name) is not None
    assert again.ended(name)["code"] == 5
    assert again.log(name) == "once\n"


def test_after_a_reboot_no_group_of_processes_is_killed_by_an_old_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of the job's groups are others' now: here, those of a program of somebody else."""
    node = _local(tmp_path)
    name = node.start("sh", "-c", f"echo $$ > {node.folder}/pid; sleep 60")
    node.up(name)
    _until_log(node, name, "", path=node.folder / "pid")
    pid = int((node.folder / "pid").read_text())
    node.executor.close()
    page = pages.Page(tmp_path / "nodes" / "node-0" / "attempts" / name)
    assert page.groups() == [pid]
    os.kill(_runner_of(pid), signal.SIGKILL)
    wait_for(lambda: not _alive(pid))
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        page.set_groups([other.pid])
        monkeypatch.setattr(pages, "this_boot", lambda: 1)
        again = _local(tmp_path)
        again.epoch = 2
        assert again.ended(name)["lost"] is True
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_two_at_one_node_are_one_too_many(tmp_path: Path) -> None:
    from cotenant.core.errors import WorkError

    node = _local(tmp_path)
    with pytest.raises(WorkError, match="another process manages this node's jobs"):
        _local(tmp_path)
    node.executor.close()


def test_a_job_over_its_memory_is_ended_and_that_is_said(tmp_path: Path) -> None:
    node = _local(tmp_path, enforce_memory=True)
    hungry = (
        "x = bytearray(400 << 20); import time; [x.__setitem__(i, 1) for i in range(0, len(x), 4096)]; time.sleep(30)"
    )
    order = node.order("hungry", (PYTHON, "-c", hungry)) | {"memory_bytes": 100 << 20}
    node.exchange(order)
    exit_ = node.ended("hungry.0")
    assert exit_["oom"] is True
    assert exit_["code"] == 137


def test_cores_are_pinned_and_no_core_is_given_twice(tmp_path: Path) -> None:
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if len(cores) < 2:
        pytest.skip("one core cannot be divided")
    node = _local(tmp_path, cores=cores[:2])
    show = (PYTHON, "-c", "import os, time; print(sorted(os.sched_getaffinity(0)), flush=True); time.sleep(30)")
    node.exchange(*(node.order(job, show) | {"cpus": 1.0} for job in ("a", "b")))
    pinned = sorted(_until_log(node, f"{job}.0", "]\n") for job in ("a", "b"))
    assert pinned == [f"[{core}]\n" for core in cores[:2]]
    for job in ("a", "b"):
        node.exchange({"do": "stop", "attempt": f"{job}.0", "why": "cancel", "grace_s": 0.0})
        node.ended(f"{job}.0")


def test_a_node_that_is_not_there_is_none(tmp_path: Path) -> None:
    executor = LocalExecutor(tmp_path, NODES)
    answers = executor.exchange(1, {"node-0": [], "node-9": []})
    assert answers["node-9"] is None, "it has gone since"
    assert answers["node-0"] is not None
    executor.close()


def test_a_full_disk_keeps_the_lease_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cotenant.fleet.noderuntime import nodejobs
    from cotenant.training.contract import Lease, read_lease, write_lease

    write_lease(tmp_path, 0, Lease(cpus=3.0, memory_bytes=10**9, until_s=1.0))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(nodejobs, "write_lease", full)
    nodejobs._write_lease(tmp_path, 0, Lease(cpus=2.0, memory_bytes=10**9, stop=True, until_s=2.0))
    assert read_lease(tmp_path) == Lease(cpus=2.0, memory_bytes=10**9, stop=True, until_s=2.0)


def _until_log(node: Node, name: str, text: str, path: Path | None = None) -> str:
    file = path or node.folder / "jobs" / name.removesuffix(".0") / "log-0-0.txt"
    wait_for(lambda: file.exists() and file.read_text() and text in file.read_text(), what=f"{text!r} in {file}")
    return file.read_text()


def _runner_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rsplit(")", 1)[1].split()[1])


def _alive(pid: int) -> bool:
    from cotenant.agent.processes import is_zombie

    return not is_zombie(pid)
