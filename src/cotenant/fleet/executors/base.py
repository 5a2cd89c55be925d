"""The contract of executors: who is a member, and one exchange of orders and reports with all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cotenant.fleet.nodes import NodeSpec

Orders = Mapping[str, list[dict[str, Any]]]


class Executor(ABC):
    """Carries orders to the nodes' `NodeJobs` and their answers back. It decides nothing and remembers nothing that
    matters: after a restart another one finds the same nodes and jobs. One test suite runs over all of them.
    """

    name: str

    @abstractmethod
    def members(self) -> dict[str, NodeSpec]:
        """Nodes that could be reached last, by name. Cheap; called at every poll."""

    @abstractmethod
    def exchange(self, epoch: int, orders: Orders) -> dict[str, dict[str, Any] | None]:
        """Send its orders to every node named and return the answers (`NodeJobs.exchange`); None: no answer came, and
        whether the orders arrived is not known. Never raises for a node that is gone."""

    @abstractmethod
    def read_log(self, node: str, path: str, offset: int) -> tuple[bytes, int]:
        """A piece of a job's log (`nodejobs.read_log`); called from other threads. Nothing where the node is gone."""

    def trouble(self) -> str:
        """What is wrong with the executor itself, for people; empty: nothing."""
        return ""

    def shutdown(self) -> None:
        """Let go for good: what this executor started itself, jobs apart, ends."""
        self.close()

    def close(self) -> None:  # noqa: B027 not every executor holds anything
        """Let go. Jobs go on."""


def job_folder(folder: Path, job: str) -> Path:
    """Where a job without a folder of its own keeps its checkpoint and logs."""
    return folder / "jobs" / job
