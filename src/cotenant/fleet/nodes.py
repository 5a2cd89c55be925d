"""Nodes as plain data: the resources of a real or pretended machine. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

PRETEND = "pretend"  # the kind of a pretended GPU: jobs are assigned to its UUID, but there is no device


@dataclass(frozen=True)
class MigInstance:
    """An existing MIG instance: its UUID and profile, such as 2g.20gb."""

    uuid: str
    profile: str

    def satisfies(self, wanted: str) -> bool:
        """Whether the instance is what a job asks for: a profile such as 2g.20gb, or only a size, such as 2g."""
        return wanted in (self.profile, self.profile.partition(".")[0])


@dataclass(frozen=True)
class NodeGpu:
    """One GPU. `kind`: the kind of device, or PRETEND."""

    uuid: str
    model: str
    memory_bytes: int
    kind: str = PRETEND
    instances: tuple[MigInstance, ...] = ()


@dataclass(frozen=True)
class NodeSpec:
    """One node. `cores`: ids of the CPU cores that jobs are pinned to; empty: no limit is enforced (pretended nodes).

    `agent`: folder of the agent's sockets, None if GPUs are assigned without one. `address`: network address at which
    the ranks of a gang find the node.
    """

    name: str
    cpus: float
    memory_bytes: int
    gpus: tuple[NodeGpu, ...]
    cores: tuple[int, ...] = ()
    agent: str | None = None
    address: str = "127.0.0.1"
    enforce_memory: bool = False

    @property
    def plain_gpus(self) -> tuple[NodeGpu, ...]:
        """GPUs without MIG instances. They are assigned whole or in shares."""
        return tuple(gpu for gpu in self.gpus if not gpu.instances)

    def plain_share(self) -> tuple[float, int]:
        """Cores and bytes for the jobs on `plain_gpus`: every GPU has an equal part, those with MIG instances too."""
        part = len(self.plain_gpus) / max(1, len(self.gpus))
        return self.cpus * part, int(self.memory_bytes * part)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def node_from_dict(data: Mapping[str, Any]) -> NodeSpec:
    """Rebuild the node from the output of `to_dict`."""
    gpus = tuple(
        NodeGpu(**{**gpu, "instances": tuple(MigInstance(**i) for i in gpu.get("instances", ()))})
        for gpu in data["gpus"]
    )
    return NodeSpec(**{**data, "gpus": gpus, "cores": tuple(data.get("cores", ()))})


def pretend_nodes(
    count: int, gpus: int, model: str, gpu_memory_bytes: int, cpus: float, memory_bytes: int
) -> tuple[NodeSpec, ...]:
    """Pretended nodes: jobs on them run on this machine, without limits."""
    return tuple(
        NodeSpec(
            name=f"node-{i}",
            cpus=cpus,
            memory_bytes=memory_bytes,
            gpus=tuple(NodeGpu(f"node-{i}-gpu-{k}", model, gpu_memory_bytes) for k in range(gpus)),
        )
        for i in range(count)
    )


def by_number(name: str) -> tuple[str, int]:
    """Sort key that puts node-2 before node-10."""
    head = name.rstrip("0123456789")
    return head, int(name[len(head) :] or 0)
