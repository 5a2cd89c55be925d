"""The Ray actor that manages one node's jobs. All state is in the node's folder, where a later actor finds the jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cotenant.core.errors import WorkError
from cotenant.fleet.noderuntime.inventory import this_machine
from cotenant.fleet.noderuntime.nodejobs import NodeJobs, read_log
from cotenant.fleet.nodes import NodeSpec, node_from_dict


class NodeActor:
    """The jobs of one node. `spec`: description of a pretended node; None: the node is this machine with its GPUs."""

    def __init__(self, folder: str, name: str, spec: dict[str, Any] | None, address: str) -> None:
        if spec is not None:
            found = node_from_dict(spec | {"address": address})
        else:
            try:
                found = this_machine(name, address)
            except WorkError:  # a machine without GPUs can be no node of the fleet
                found = NodeSpec(name, 0.0, 0, ())
        self.jobs = NodeJobs(Path(folder), found, patience_s=10.0)

    def facts(self) -> dict[str, Any]:
        """Return the description of the actor's node, as plain data."""
        return self.jobs.spec.to_dict()

    def exchange(self, epoch: int, number: int, orders: str) -> str:
        """See NodeJobs.exchange."""
        return json.dumps(self.jobs.exchange(epoch, number, json.loads(orders)))

    def read_log(self, path: str, offset: int) -> tuple[bytes, int]:
        """See nodejobs.read_log."""
        return read_log(path, offset)
