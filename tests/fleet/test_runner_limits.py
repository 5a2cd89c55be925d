"""The runner of an attempt: limits that it enforces itself, orders that come early; and what its node reads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from fleet_orders import PYTHON, Node
from waiting import wait_for

from cotenant.fleet.executors.local import LocalExecutor
from cotenant.fleet.noderuntime import limits
from cotenant.fleet.noderuntime.attempt import ENDED, LIMITS_FILE, ORDER_FILE, Page
from cotenant.fleet.noderuntime.runner import Runner
from cotenant.fleet.nodes import pretend_nodes
from cotenant.training.contract import PROGRESS_FILE, Progress, write_progress


def test_without_a_cgroup_the_runner_watches_memory_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "V2", tmp_path)
    assert limits.make_cgroup("none") is None
    assert limits.own_memory_bytes([2**22 + 1]) == 0, "there is no such process"
    (tmp_path / ORDER_FILE).write_text("{}")
    Page(tmp_path, create=True).close()
    hold = "x = bytearray(64 << 20); x[::4096] = b'x' * len(x[::4096]); print(flush=True); import time; time.sleep(60)"
    with subprocess.Popen([PYTHON, "-c", hold], stdout=subprocess.PIPE, start_new_session=True) as job:
        assert job.stdout is not None
        job.stdout.readline()
        runner = Runner(tmp_path)
        runner.ranks = {job.pid: 0}
        runner.limits = {"memory_bytes": 64 << 30}
        runner.watch_memory()
        assert not runner.oom
        runner.limits = {"memory_bytes": 64 << 20}
        runner.watch_memory()
        assert runner.oom
        assert job.wait(60) == -signal.SIGKILL
    runner.page.close()


WOKEN = """
import os, signal, sys
from pathlib import Path
from cotenant.fleet.noderuntime.attempt import Page
from cotenant.fleet.noderuntime.runner import Runner
write = Page.set
def set_and_wake(page, name, value):
    write(page, name, value)
    if name == "runner_pid":
        os.kill(value, signal.SIGUSR1)
Page.set = set_and_wake
Runner(Path(sys.argv[1])).run()
"""


def test_a_runner_that_is_woken_as_soon_as_its_pid_is_known_lives(tmp_path: Path) -> None:
    """The node resizes or stops a job of which it knows nothing but the pid of its runner."""
    rank = {"rank": 0, "log": str(tmp_path / "log"), "environment": {}}
    order = {"command": ["true"], "environment": {}, "workdir": str(tmp_path), "ranks": [rank]}
    (tmp_path / ORDER_FILE).write_text(json.dumps(order))
    (tmp_path / LIMITS_FILE).write_text("{}")
    page = Page(tmp_path, create=True)
    # the first process ends when it has left the runner behind
    subprocess.run([PYTHON, "-c", WOKEN, str(tmp_path)], check=True, timeout=60)
    wait_for(lambda: page.get("phase") == ENDED or not page.runner_lives(), what="the end of the attempt")
    assert page.get("phase") == ENDED
    assert (page.exit()["code"], page.exit()["error"]) == (0, "")
    page.close()


def test_reports_of_one_tick_of_the_file_systems_clock_are_all_read(tmp_path: Path) -> None:
    """A job that finishes just after its last report would not be seen as finished."""
    executor = LocalExecutor(tmp_path, pretend_nodes(1, 1, "A100-40GB", 40 << 30, 2.0, 10**10))
    node = Node(executor, tmp_path, 1)
    name = node.start("sleep", "600")
    for step in (1, 2):
        progress = Progress(
            attempt=0, state="running", step=step, total_steps=2, fraction=step / 2, epoch=0, checkpoint_step=None,
            steps_per_s=None, written_unix_s=0.0,
        )  # fmt: skip
        write_progress(tmp_path / "jobs" / name.removesuffix(".0"), progress)
        os.utime(tmp_path / "jobs" / name.removesuffix(".0") / PROGRESS_FILE, ns=(10**9, 10**9))
        report = node.report(name)
        assert report is not None
        assert report["progress"]["step"] == step
    executor.shutdown()
