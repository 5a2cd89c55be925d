"""Options of the command line about nodes, and the defaults of nodes."""

from __future__ import annotations

from cotenant.core.cluster import NodeGroup
from cotenant.core.errors import InputError
from cotenant.core.gpus import Gpu, find_gpu
from cotenant.core.units import parse_memory

DEFAULT_GPU = "A100-40GB"
CPUS_PER_GPU = 3.0
MEMORY_BYTES_PER_GPU = 62_500_000_000
STORAGE_MBPS = 500.0


class NodeOptions:
    """Validated options of the command line about nodes. An attribute is None if its option was not given."""

    def __init__(
        self,
        gpu: str | None,
        cpus_per_node: float | None,
        memory_per_node: str | float | None,
        storage_mbps: float | None,
    ) -> None:
        self.gpu: Gpu | None = find_gpu(gpu, field="gpu") if gpu else None
        for name, value in (("cpus-per-node", cpus_per_node), ("storage-mbps", storage_mbps)):
            if value is not None and not 0 < value < 1e9:
                raise InputError(f"{value:g} is not above 0 and below 1,000,000,000", field=name)
        self.cpus = cpus_per_node
        self.storage_mbps = storage_mbps
        self.memory_bytes: int | None = None
        if memory_per_node is not None:
            self.memory_bytes = parse_memory(memory_per_node, field="memory-per-node")

    def group(
        self, count: int, gpus: int, cpus: float | None, memory_bytes: float | None, storage_mbps: float | None = None
    ) -> NodeGroup:
        """Build a group of `count` equal nodes. CPUs, memory and storage bandwidth are each set by the option of the
        command line; if it was not given, by the argument; if that is None, by the default.
        """
        return NodeGroup(
            count=count,
            gpus=gpus,
            gpu=self.gpu or find_gpu(DEFAULT_GPU),
            cpus=_first(self.cpus, cpus, CPUS_PER_GPU * gpus),
            memory_bytes=round(_first(self.memory_bytes, memory_bytes, MEMORY_BYTES_PER_GPU * gpus)),
            storage_mbps=_first(self.storage_mbps, storage_mbps, STORAGE_MBPS),
        )


def _first(*values: float | None) -> float:
    return next(float(value) for value in values if value is not None)
