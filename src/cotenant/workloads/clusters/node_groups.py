"""Reads a cluster file in YAML, whose `nodes` are a list of groups of equal nodes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cotenant.core.checked import Memory, Strict, check, parsed
from cotenant.core.cluster import MAX_GPUS_PER_NODE, MAX_NODES, Cluster, NodeGroup
from cotenant.core.gpus import find_gpu
from cotenant.core.yamlfile import read_yaml
from cotenant.workloads.clusters.node_options import DEFAULT_GPU, NodeOptions
from cotenant.workloads.table import check_path


class NodesEntry(Strict):
    """One entry of `nodes`, a group of equal nodes. If gpu, cpus, memory or storage_mbps are left out, the command line
    or defaults apply.
    """

    count: int = Field(default=1, ge=1, le=MAX_NODES)
    """Number of nodes of this group."""
    gpus: int = Field(ge=0, le=MAX_GPUS_PER_NODE)
    """Number of GPUs of each node."""
    gpu: Annotated[str, parsed(lambda name: find_gpu(name).name if isinstance(name, str) else name)] | None = None
    """Model of the GPUs."""
    cpus: float | None = Field(default=None, gt=0, lt=1e6)
    """Number of CPU cores of each node."""
    memory: Memory | None = None
    """Memory of each node."""
    storage_mbps: float | None = Field(default=None, gt=0, lt=1e9)
    """Storage bandwidth of each node, in 10^6 bytes per second."""
    name: str | None = None
    """Prefix of the names of the nodes: NAME0, NAME1, ..."""


class ClusterFile(Strict):
    """A cluster file."""

    nodes: list[NodesEntry] = Field(min_length=1)
    """Groups of equal nodes."""


def read_cluster_yaml(path: str, wishes: NodeOptions) -> Cluster:
    """Return the cluster that a YAML file describes; InputError names line and field."""
    check_path(path)
    read = read_yaml(path)
    with read.located():
        described = check(ClusterFile, read.content if read.content is not None else {})
    return Cluster(tuple(_group(entry, wishes) for entry in described.nodes), source=path)


def _group(entry: NodesEntry, wishes: NodeOptions) -> NodeGroup:
    # the values of the file take precedence over those of the options, because the file's groups may differ and an
    # option applies to all of them
    defaults = wishes.group(entry.count, entry.gpus, None, None)
    gpu = find_gpu(entry.gpu) if entry.gpu else wishes.gpu or find_gpu(DEFAULT_GPU)
    return NodeGroup(
        count=entry.count,
        gpus=entry.gpus,
        gpu=gpu,
        cpus=defaults.cpus if entry.cpus is None else entry.cpus,
        memory_bytes=defaults.memory_bytes if entry.memory is None else entry.memory,
        storage_mbps=defaults.storage_mbps if entry.storage_mbps is None else entry.storage_mbps,
        name=entry.name or "node",
    )
