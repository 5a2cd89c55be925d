"""Nodes and clusters as plain data. The package workloads.clusters parses descriptions of clusters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from cotenant.core.errors import InputError
from cotenant.core.gpus import Gpu
from cotenant.core.units import format_memory

MAX_NODES = 1_000_000
MAX_GPUS_PER_NODE = 1024
MAX_MEMORY_BYTES = 10**18


@dataclass(frozen=True)
class NodeGroup:
    """`count` equal nodes: GPUs of one model, CPU cores, memory, storage bandwidth. `name` prefixes the node names."""

    count: int
    gpus: int
    gpu: Gpu
    cpus: float
    memory_bytes: int
    storage_mbps: float = 500.0
    name: str = "node"


@dataclass(frozen=True)
class Cluster:
    """A cluster: its machines, as groups of equal nodes. Node ids count through the groups in order."""

    groups: tuple[NodeGroup, ...]
    source: str = ""

    def __post_init__(self) -> None:
        if not self.groups or self.total_gpus == 0:
            raise InputError("the cluster has no GPUs", file=self.source or None)
        for group in self.groups:
            if not 0 < group.count <= MAX_NODES:
                raise InputError(
                    f"must be between 1 and {MAX_NODES:,} nodes, not {group.count:,}", file=self.source or None
                )
            if not 0 <= group.gpus <= MAX_GPUS_PER_NODE:
                raise InputError(
                    f"must be between 0 and {MAX_GPUS_PER_NODE:,} GPUs per node, not {group.gpus:,}",
                    file=self.source or None,
                )
            if group.memory_bytes > MAX_MEMORY_BYTES:
                raise InputError("a node has at most 1e9 GB of memory", file=self.source or None, field="memory")
            # below one thousandth of a core or 10^6 bytes per GPU, a GPU's part of the node would be rounded to 0
            if group.cpus * 1000 < group.gpus or group.memory_bytes < 10**6 * group.gpus:
                raise InputError(
                    "a node needs at least 0.001 CPU cores and 1 MB of memory for each GPU", file=self.source or None
                )

    @property
    def total_nodes(self) -> int:
        return sum(g.count for g in self.groups)

    @property
    def total_gpus(self) -> int:
        return sum(g.count * g.gpus for g in self.groups)

    @property
    def total_cpus(self) -> float:
        return sum(g.count * g.cpus for g in self.groups)

    @property
    def total_memory_bytes(self) -> int:
        return sum(g.count * g.memory_bytes for g in self.groups)

    @cached_property
    def gpu_models(self) -> tuple[str, ...]:
        """Return the distinct GPU model names in order of first appearance."""
        return tuple(dict.fromkeys(g.gpu.name for g in self.groups if g.gpus))

    def describe(self) -> str:
        """Describe the cluster in one line for users: 16 nodes x 8 A100-40GB, 24 CPUs, 500 GB each."""
        return "; ".join(
            f"{g.count:,} x {g.gpus} {g.gpu.name}, {g.cpus:g} CPU{'' if g.cpus == 1 else 's'}, "
            f"{format_memory(g.memory_bytes)}"
            for g in self.groups
        )
