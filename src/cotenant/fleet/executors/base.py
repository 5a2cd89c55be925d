"""Interface of executors: membership, and one exchange of orders and reports with all nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cotenant.fleet.nodes import NodeSpec

Orders = Mapping[str, list[dict[str, Any]]]


class Executor(ABC):
    """Carries orders to the nodes' `NodeJobs` and their answers back. It makes no decisions and keeps no state of
    importance: a new one finds the same nodes and jobs. One test suite covers all executors.
    """

    name: str

    @abstractmethod
    def members(self) -> dict[str, NodeSpec]:
        """Nodes that could be reached at the last contact, by name. Called at every poll, so it must be fast."""

    @abstractmethod
    def exchange(self, epoch: int, orders: Orders) -> dict[str, dict[str, Any] | None]:
        """Send each named node its orders and return the answers (`NodeJobs.exchange`). None: no answer came, and it is
        unknown whether the orders arrived. Never raises for a vanished node.
        """

    @abstractmethod
    def read_log(self, node: str, path: str, offset: int) -> tuple[bytes, int]:
        """A piece of a job's log (`nodejobs.read_log`); called from other threads. Empty if the node is gone."""

    def fault(self) -> str:
        """Fault of the executor itself, as a sentence; empty: none."""
        return ""

    def shutdown(self) -> None:
        """Release everything. Ends all processes that this executor started, except jobs."""
        self.close()

    def close(self) -> None:  # noqa: B027 not every executor holds anything
        """Release the connection. Jobs continue."""


def job_folder(folder: Path, job: str) -> Path:
    """Folder for checkpoint and logs of a job without a folder of its own."""
    return folder / "jobs" / job
