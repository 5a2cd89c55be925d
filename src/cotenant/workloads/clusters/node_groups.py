"""A cluster file in YAML: `nodes`, a list of groups of equal nodes."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from cotenant.core.cluster import MAX_GPUS_PER_NODE, MAX_NODES, Cluster, NodeGroup
from cotenant.core.errors import InputError
from cotenant.core.gpus import find_gpu
from cotenant.core.units import parse_bytes
from cotenant.core.yamlfile import read_yaml
from cotenant.workloads.clusters.node_options import DEFAULT_GPU, NodeOptions
from cotenant.workloads.table import check_path


class NodesEntry(BaseModel):
    """One entry of `nodes`. Left out: gpu, cpus, memory and storage_mbps come from the command line or defaults."""

    model_config = ConfigDict(extra="forbid")

    count: int = Field(default=1, ge=1, le=MAX_NODES)
    gpus: int = Field(ge=0, le=MAX_GPUS_PER_NODE)
    gpu: str | None = None
    cpus: float | None = Field(default=None, gt=0, lt=1e6)
    memory: int | None = Field(default=None, gt=0)
    storage_mbps: float | None = Field(default=None, gt=0, lt=1e9)
    name: str | None = None

    @field_validator("count", "gpus", "cpus", "storage_mbps", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        if isinstance(value, bool):  # Python counts them as 0 and 1
            raise ValueError(f"{str(value).lower()} is not a number")
        return value

    @field_validator("memory", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        if value is None or not isinstance(value, str | int | float):
            return value
        try:
            return parse_bytes(value)
        except InputError as error:
            raise ValueError(error.message) from None

    @field_validator("gpu")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        try:
            return None if value is None else find_gpu(value).name
        except InputError as error:
            raise ValueError(error.message) from None


class ClusterFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid")

    nodes: list[NodesEntry] = Field(min_length=1)


def read_cluster_yaml(path: str, wishes: NodeOptions) -> Cluster:
    """The cluster of a YAML file; InputError names line and field."""
    check_path(path)
    read = read_yaml(path)
    try:
        described = ClusterFile.model_validate(read.content if read.content is not None else {})
    except ValidationError as error:
        first = error.errors()[0]
        where = first["loc"]
        message = str(first["msg"]).removeprefix("Value error, ")
        raise InputError(
            message[0].lower() + message[1:] if not message.startswith("GPU") else message,
            file=path,
            line=read.line(where),
            field="".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).lstrip(".") or None,
        ) from None
    return Cluster(tuple(_group(entry, wishes) for entry in described.nodes), source=path)


def _group(entry: NodesEntry, wishes: NodeOptions) -> NodeGroup:
    # the file goes first here: its groups may differ, and one option for all of them must not level them
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

