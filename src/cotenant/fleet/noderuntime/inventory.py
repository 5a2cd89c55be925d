"""Descriptions of nodes: this machine with its GPUs, a node with the GPUs of an agent, and pretended nodes, which have
the resources of a described cluster but no devices.
"""

from __future__ import annotations

import os
from pathlib import Path

from cotenant.agent.ipc.client import ControlClient
from cotenant.core.cluster import Cluster
from cotenant.devices.base import Gpu
from cotenant.devices.nvidia import Nvidia
from cotenant.devices.registry import device, device_of, discover
from cotenant.fleet.nodes import MigInstance, NodeGpu, NodeSpec

SPARE_MEMORY = 0.05  # this fraction of the machine's memory is left to the system


def cores_here() -> tuple[int, ...]:
    """CPU cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def memory_here() -> int:
    """Memory of this machine in bytes, without the part left to the system."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(pages * (1 - SPARE_MEMORY))


def this_machine(name: str = "node-0", address: str = "127.0.0.1") -> NodeSpec:
    """This machine as a node. Its GPUs are assigned whole or, where MIG is on, by instance. Raises WorkError if there
    is no GPU.
    """
    gpus = tuple(
        NodeGpu(gpu.uuid, gpu.name, gpu.memory_bytes, gpu.kind, _instances(gpu))
        for gpu in discover([device(Nvidia.name).word])
    )
    cores = cores_here()
    return NodeSpec(name, float(len(cores)), memory_here(), gpus, cores, None, address, enforce_memory=True)


def _instances(gpu: Gpu) -> tuple[MigInstance, ...]:
    return tuple(MigInstance(uuid, profile) for profile, uuid in device_of(gpu).mig_instances(gpu.uuid))


def agent_node(name: str, folder: Path) -> NodeSpec:
    """A node with the GPUs of an agent on this machine. Raises WorkError if no agent answers."""
    with ControlClient(folder, 10.0) as client:
        status = client.call("status")
    gpus = tuple(NodeGpu(gpu["uuid"], gpu["name"], int(gpu["memory_bytes"]), gpu["kind"]) for gpu in status["gpus"])
    cores = cores_here()
    return NodeSpec(name, float(len(cores)), memory_here(), gpus, cores, str(folder), enforce_memory=True)


def nodes_of_cluster(cluster: Cluster) -> tuple[NodeSpec, ...]:
    """Return a pretended node for each node of a cluster, described as for a simulation, that has GPUs."""
    found: list[NodeSpec] = []
    for group in cluster.groups:
        for _ in range(group.count if group.gpus else 0):
            name = f"node-{len(found)}"
            gpus = tuple(NodeGpu(f"{name}-gpu-{k}", group.gpu.name, group.gpu.memory_bytes) for k in range(group.gpus))
            found.append(NodeSpec(name, group.cpus, group.memory_bytes, gpus))
    return tuple(found)
