"""Interface of executors: membership, and one exchange of orders and reports with all nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cotenant.fleet.nodes import NodeSpec

Orders = Mapping[str, list[dict[str, Any]]]


class Executor(ABC):
    """Carries orders to the nodes, and their answers back. On each node, a `NodeJobs` object (noderuntime/nodejobs.py)
    executes the orders. An executor makes no decisions and keeps no state of importance: a new executor finds the same
    nodes and jobs. One test suite covers all executors.
    """

    name: str

    @abstractmethod
    def members(self) -> dict[str, NodeSpec]:
        """The nodes that the executor could reach at its last contact, by name. Called at every poll, so it must be
        fast.
        """

    @abstractmethod
    def exchange(self, epoch: int, orders: Orders) -> dict[str, dict[str, Any] | None]:
        """Send each named node its orders and return the answers of `NodeJobs.exchange`. `epoch`: number of the
        controller's run, by which nodes refuse orders of an older controller. None: no answer came, and it is unknown
        whether the orders arrived. Never raises for a vanished node.
        """

    @abstractmethod
    def read_log(self, node: str, path: str, offset: int) -> tuple[bytes, int]:
        """Return some bytes of a job's log from `offset` (negative: from the end), and the offset after them. There are
        none if the node is gone. Called from other threads than the controller's.
        """

    def fault(self) -> str:
        """What prevents the executor itself from working, as a sentence; empty if nothing does."""
        return ""

    def shutdown(self) -> None:
        """Release all resources of the executor. Ends all processes that this executor started, except jobs."""
        self.close()

    def close(self) -> None:  # noqa: B027 not every executor holds anything
        """Release the executor's connection to its nodes. Jobs continue."""


def job_folder(folder: Path, job: str) -> Path:
    """Folder for checkpoint and logs of a job without a folder of its own."""
    return folder / "jobs" / job
