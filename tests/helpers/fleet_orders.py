"""Orders for executors in the form in which the controller writes them, and functions that wait for the effects."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waiting import wait_for

from cotenant.fleet.executors.base import Executor
from cotenant.fleet.noderuntime import attempt as pages

PYTHON = sys.executable
_names = itertools.count()


class Node:
    """One node of an executor, which gets its orders from a controller with an epoch of its own."""

    def __init__(self, executor: Executor, folder: Path, epoch: int, name: str = "node-0") -> None:
        self.executor, self.folder, self.epoch, self.name = executor, folder, epoch, name

    def exchange(self, *orders: dict[str, Any]) -> dict[str, Any]:
        """Send orders to the node and return its answer. Fails if the node does not answer."""
        answer = self.executor.exchange(self.epoch, {self.name: list(orders)})[self.name]
        assert answer is not None
        return answer

    def start(self, *command: str, ranks: int = 1, lease_s: float = 600.0, grace_s: float = 60.0, **more: Any) -> str:
        """Start an attempt of a new job; returns its name."""
        job = f"job{next(_names)}"
        order = self.order(job, command, ranks, lease_s, grace_s) | more
        assert self.exchange(order)["results"] == [{}]
        return f"{job}.0"

    def order(
        self, job: str, command: tuple[str, ...], ranks: int = 1, lease_s: float = 600.0, grace_s: float = 60.0
    ) -> dict[str, Any]:
        """An order to start an attempt."""
        job_dir = self.folder / "jobs" / job
        return {
            "do": "start",
            "attempt": f"{job}.0",
            "job": job,
            "n": 0,
            "command": list(command),
            "environment": {"FROM_JOB": "yes"},
            "workdir": str(self.folder),
            "job_dir": str(job_dir),
            "gpus": [{"uuid": f"{self.name}-gpu-0", "fraction": 1.0, "mechanism": "whole", "instance": None}],
            "cpus": 3.0,
            "memory_bytes": 2 * 10**9,
            "until_ns": self.exchange()["now_ns"] + round(lease_s * 1e9),
            "grace_s": grace_s,
            "ranks": [
                {"rank": r, "log": str(job_dir / f"log-0-{r}.txt"), "environment": {"RANK": str(r)}}
                for r in range(ranks)
            ],
        }

    def report(self, name: str) -> dict[str, Any] | None:
        """The node's present report on an attempt."""
        return next((r for r in self.exchange()["reports"] if r["attempt"] == name), None)

    def until(self, name: str, done: Callable[[dict[str, Any]], bool], timeout_s: float = 60.0) -> dict[str, Any]:
        """The first report for which `done` holds."""

        def there() -> dict[str, Any] | None:
            report = self.report(name)
            return report if report is not None and done(report) else None

        found: dict[str, Any] = wait_for(there, timeout_s, name)
        return found

    def up(self, name: str) -> dict[str, Any]:
        """Wait until an attempt's processes run."""
        return self.until(name, lambda r: r["phase"] >= pages.RUNNING)

    def ended(self, name: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until an attempt has ended; returns its exit."""
        exit_: dict[str, Any] = self.until(name, lambda r: r["phase"] == pages.ENDED, timeout_s)["exit"]
        return exit_

    def log(self, name: str, rank: int = 0) -> str:
        """Output of an attempt."""
        path = self.folder / "jobs" / name.removesuffix(".0") / f"log-0-{rank}.txt"
        return path.read_text()
