"""A cluster file in YAML: `nodes`, a list of groups of equal nodes."""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from cotenant.model.cluster import MAX_GPUS_PER_NODE, MAX_NODES, Cluster, NodeGroup
from cotenant.model.errors import InputError
from cotenant.model.gpus import find_gpu
from cotenant.model.units import parse_bytes
from cotenant.traces.cluster_files import DEFAULT_GPU, Wishes
from cotenant.traces.table import check_path


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


def read_cluster_yaml(path: str, wishes: Wishes) -> Cluster:
    """The cluster of a YAML file; InputError names line and field."""
    data = check_path(path).read_bytes()
    try:
        tree = yaml.compose(data, Loader=yaml.SafeLoader)
        _refuse_repeated_keys(path, tree)
        content = yaml.safe_load(data)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise InputError(f"the file is not YAML: {error.problem}", file=path, line=line) from None
    except RecursionError:
        raise InputError("the file is not a cluster: it is nested too deeply", file=path) from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise InputError(f"the file is not YAML: {str(error).splitlines()[0]}", file=path) from None
    try:
        described = ClusterFile.model_validate(content if content is not None else {})
    except ValidationError as error:
        first = error.errors()[0]
        where = first["loc"]
        message = str(first["msg"]).removeprefix("Value error, ")
        raise InputError(
            message[0].lower() + message[1:] if not message.startswith("GPU") else message,
            file=path,
            line=line_of(tree, where),
            field="".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).lstrip(".") or None,
        ) from None
    return Cluster(tuple(_group(entry, wishes) for entry in described.nodes), source=path)


def _group(entry: NodesEntry, wishes: Wishes) -> NodeGroup:
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


def _refuse_repeated_keys(path: str, tree: Any) -> None:
    """InputError where a mapping names a key twice: YAML forbids it, yet the loader would take the last one."""
    pending, seen = [tree], set()
    while pending:
        node = pending.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            pending += reversed(node.value)
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, _ in node.value:
                name, line = str(key.value), key.start_mark.line + 1
                if isinstance(key, yaml.ScalarNode) and name in lines:
                    raise InputError(f"{name} is already given on line {lines[name]}", file=path, line=line, field=name)
                lines.setdefault(name, line)
            pending += reversed([value for _, value in node.value])


def line_of(tree: Any, where: tuple[int | str, ...]) -> int | None:
    """Line, from 1, of the deepest part of a field path that the YAML tree has."""
    if tree is None:
        return None
    line: int = tree.start_mark.line + 1
    for part in where:
        if isinstance(tree, yaml.MappingNode):
            pair = next(((k, v) for k, v in tree.value if k.value == str(part)), None)
            if pair is None:
                return line
            line, tree = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(tree, yaml.SequenceNode) and isinstance(part, int) and part < len(tree.value):
            tree = tree.value[part]
            line = tree.start_mark.line + 1
        else:
            return line
    return line
