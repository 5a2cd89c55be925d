"""The executor without Ray: starts every node's jobs on this machine, from this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cotenant.fleet.executors.base import Executor, Orders
from cotenant.fleet.noderuntime import nodejobs
from cotenant.fleet.noderuntime.nodejobs import NodeJobs
from cotenant.fleet.nodes import NodeSpec


class LocalExecutor(Executor):
    """Executor that runs the jobs of each node on this machine, with the nodes' state in folders below `folder`."""

    name = "local"

    def __init__(self, folder: Path, nodes: Sequence[NodeSpec]) -> None:
        self._nodes = {node.name: NodeJobs(folder / "nodes" / node.name, node) for node in nodes}
        self._numbers = dict.fromkeys(self._nodes, 0)

    def members(self) -> dict[str, NodeSpec]:
        return {name: node.spec for name, node in self._nodes.items()}

    def exchange(self, epoch: int, orders: Orders) -> dict[str, dict[str, Any] | None]:
        answers: dict[str, dict[str, Any] | None] = {}
        for name, wanted in orders.items():
            if name not in self._nodes:
                answers[name] = None
                continue
            self._numbers[name] += 1
            answers[name] = self._nodes[name].exchange(epoch, self._numbers[name], wanted)
        return answers

    def read_log(self, node: str, path: str, offset: int) -> tuple[bytes, int]:
        return nodejobs.read_log(path, offset)

    def close(self) -> None:
        for node in self._nodes.values():
            node.close()
