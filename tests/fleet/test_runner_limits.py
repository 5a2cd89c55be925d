"""Limits that the runner of an attempt enforces itself."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from fleet_orders import PYTHON

from cotenant.fleet.noderuntime import limits
from cotenant.fleet.noderuntime.attempt import ORDER_FILE, Page
from cotenant.fleet.noderuntime.runner import Runner


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
