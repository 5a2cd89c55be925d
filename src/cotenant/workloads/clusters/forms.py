"""Parses the value of --cluster: NODESxGPUS such as 16x8 (16 nodes with 8 GPUs each), FILE.yaml, synergy-ini:FILE,
openb:NODES.csv, alibaba-spot:NODES.csv, tiresias:FILE.csv."""

from __future__ import annotations

import configparser
import re
from collections import Counter
from pathlib import Path

import numpy as np

from cotenant.core.cluster import Cluster, NodeGroup
from cotenant.core.errors import InputError
from cotenant.core.gpus import find_gpu
from cotenant.core.units import counted, number_or_nan
from cotenant.core.work import Floats
from cotenant.workloads.clusters.node_groups import read_cluster_yaml
from cotenant.workloads.clusters.node_options import MEMORY_BYTES_PER_GPU, STORAGE_MBPS, NodeOptions
from cotenant.workloads.table import Table, check_path
from cotenant.workloads.table_files import read_csv

SHORT = re.compile(r"^(\d+)x(\d+)$")
# values that the public Synergy simulator uses for keys that its INI file leaves out
INI_DEFAULTS = {"racks": 1.0, "gpus_per_server": 8.0, "cpus_per_server": 24.0, "dram_per_server": 500.0,
                "sspeed_per_server": 300.0}  # fmt: skip


def parse_cluster(
    spec: str,
    *,
    gpu: str | None = None,
    cpus_per_node: float | None = None,
    memory_per_node: str | float | None = None,
    storage_mbps: float | None = None,
    remarks: list[str] | None = None,
) -> Cluster:
    """Return the cluster that `spec` describes. InputError if it describes none.

    `gpu` is the name of a model in the GPU catalog (core/gpus.py), `memory_per_node` a quantity like 500GB. Given
    options replace the values of INI and Tiresias files, and are defaults for a YAML file. With a node list (openb,
    alibaba-spot), options for values that the list states for each node are an error. Remarks about nodes that were
    left out, and about values that the list does not state, are appended to `remarks`.
    """
    wishes = NodeOptions(gpu, cpus_per_node, memory_per_node, storage_mbps)
    notes = remarks if remarks is not None else []
    short = SHORT.match(spec.strip())
    if short:
        return _short(spec, int(short.group(1)), int(short.group(2)), wishes)
    kind, colon, path = spec.partition(":")
    if colon and not path and kind in ("synergy-ini", "openb", "alibaba-spot", "tiresias"):
        raise InputError(f"{spec!r} names no file; write {kind}:FILE", field="cluster")
    if colon and kind == "synergy-ini":
        return _synergy_ini(path, wishes)
    if colon and kind == "openb":
        return _openb(path, wishes, notes)
    if colon and kind == "alibaba-spot":
        return _alibaba_spot(path, wishes, notes)
    if colon and kind == "tiresias":
        return _tiresias(path, wishes)
    if Path(spec).suffix.lower() in (".yaml", ".yml"):
        return read_cluster_yaml(spec, wishes)
    raise InputError(
        f"{spec!r} is not a cluster; write NODESxGPUS like 16x8, FILE.yaml, synergy-ini:FILE, openb:NODES.csv, "
        "alibaba-spot:NODES.csv or tiresias:FILE.csv",
        field="cluster",
    )


def _short(spec: str, nodes: int, gpus: int, wishes: NodeOptions) -> Cluster:
    try:
        return Cluster((wishes.group(nodes, gpus, None, None),))
    except InputError as error:
        raise InputError(f"{spec!r}: {error.message}", field="cluster") from None


def _synergy_ini(path: str, wishes: NodeOptions) -> Cluster:
    text = check_path(path).read_bytes().decode("utf-8", errors="replace")
    parser = configparser.ConfigParser(inline_comment_prefixes=("#", ";"), strict=False, interpolation=None)
    try:
        parser.read_string(text)
    except configparser.MissingSectionHeaderError as error:
        raise InputError("the file has no section; it needs [CLUSTER]", file=path, line=error.lineno) from None
    except configparser.ParsingError as error:
        raise InputError("the line is not KEY = VALUE", file=path, line=error.errors[0][0]) from None
    except configparser.Error as error:
        raise InputError(f"the file is not INI: {str(error).splitlines()[0]}", file=path) from None
    section = next((name for name in parser.sections() if name.upper() == "CLUSTER"), None)
    if section is None:
        raise InputError("the file has no section [CLUSTER]", file=path)

    def number(key: str, *, whole: bool = False) -> float:
        written = parser[section].get(key)
        if written is None and key in INI_DEFAULTS:
            return INI_DEFAULTS[key]
        value = number_or_nan(written)
        if not 0 < value < 1e9 or (whole and value != int(value)):
            message = f"{written!r} is not a {'whole ' if whole else ''}number above 0" if written else "is missing"
            raise InputError(message, file=path, line=_line_of(text, key), field=key)
        return value

    nodes = int(number("racks", whole=True) * number("servers_per_rack", whole=True))
    group = wishes.group(
        nodes,
        int(number("gpus_per_server", whole=True)),
        number("cpus_per_server"),
        number("dram_per_server") * 1e9,
        number("sspeed_per_server"),
    )
    return Cluster((group,), source=path)


def _line_of(text: str, key: str) -> int | None:
    for index, line in enumerate(text.splitlines(), start=1):
        if re.match(rf"\s*{re.escape(key)}\s*[=:]", line, re.IGNORECASE):
            return index
    return None


def _openb(path: str, wishes: NodeOptions, notes: list[str]) -> Cluster:
    """Read a cluster from the node list of Alibaba's trace of 2023. Nodes without GPUs are left out; equal nodes become
    one group.
    """
    _leave_out_options(path, gpu=wishes.gpu, cpus_per_node=wishes.cpus, memory_per_node=wishes.memory_bytes)
    table = read_csv(path, ("sn", "cpu_milli", "memory_mib", "gpu", "model"))
    table.require("cpu_milli", "memory_mib", "gpu", "model")
    _leave_out_without_gpus(table, "gpu", notes)
    cpus = table.numbers("cpu_milli", above=0) / 1000
    return _grouped(table, "gpu", "model", cpus, table.numbers("memory_mib", above=0) * 2**20, wishes)


def _alibaba_spot(path: str, wishes: NodeOptions, notes: list[str]) -> Cluster:
    """Read a cluster from the node list of Alibaba's trace of 2026. It has no memory column, so memory is a default per
    GPU.
    """
    _leave_out_options(path, gpu=wishes.gpu, cpus_per_node=wishes.cpus)
    table = read_csv(path, ("gpu_model", "gpu_capacity_num", "cpu_num"))
    table.require("gpu_model", "gpu_capacity_num", "cpu_num")
    _leave_out_without_gpus(table, "gpu_capacity_num", notes)
    gpus, cpus = table.numbers("gpu_capacity_num"), table.numbers("cpu_num", above=0)
    memory = gpus * MEMORY_BYTES_PER_GPU if wishes.memory_bytes is None else gpus * 0 + wishes.memory_bytes
    notes.append("the node list states no memory; --memory-per-node sets it (62.5 GB per GPU where not given)")
    return _grouped(table, "gpu_capacity_num", "gpu_model", cpus, memory, wishes)


def _leave_out_options(path: str, **given: object) -> None:
    for name, value in given.items():
        if value is not None:
            option = name.replace("_", "-")
            raise InputError(f"a node list states each node; leave --{option} out", file=path, field=option)


def _leave_out_without_gpus(table: Table, field: str, notes: list[str]) -> None:
    if not len(table):
        raise InputError("the node list is empty", file=table.path)
    gpus = table.numbers(field, least=0, most=1024, whole=True)
    cpu_only = int((gpus == 0).sum())
    if cpu_only:
        notes.append(f"{counted(cpu_only, 'node')} without GPUs left out of the cluster")
        table.leave_out(gpus == 0, "no GPUs")


def _grouped(table: Table, count: str, model: str, cpus: Floats, memory: Floats, wishes: NodeOptions) -> Cluster:
    """Combine equal nodes into groups. `count` and `model` are the names of the columns of `table` that state how many
    GPUs a node has, and their model.
    """
    rows = zip(
        table.numbers(count).tolist(), table.texts(model).tolist(), cpus.tolist(), memory.tolist(), strict=True
    )  # fmt: skip
    groups: list[NodeGroup] = []
    for (gpus, name, n_cpus, n_bytes), nodes in Counter(rows).items():
        try:
            found = find_gpu(name)
        except InputError as error:
            table.fail(int(np.argmax(table.texts(model) == name)), model, error.message)
        groups.append(
            NodeGroup(
                count=nodes,
                gpus=int(gpus),
                gpu=found,
                cpus=n_cpus,
                memory_bytes=round(n_bytes),
                storage_mbps=wishes.storage_mbps or STORAGE_MBPS,
                name=f"{found.name.lower()}-{len(groups)}",
            )
        )
    return Cluster(tuple(groups), source=table.path)


def _tiresias(path: str, wishes: NodeOptions) -> Cluster:
    """Read a cluster file of Tiresias: one row with switches, nodes per switch, and GPUs, CPUs and GB per node."""
    names = ("num_switch", "num_node_p_switch", "num_gpu_p_node", "num_cpu_p_node", "mem_p_node")
    table = read_csv(path, names)
    table.require(*names)
    if len(table) != 1:
        raise InputError(f"the file has {len(table)} rows below its header; one is needed", file=path)
    switches, nodes, gpus = (int(table.numbers(name, above=0, most=1e6, whole=True)[0]) for name in names[:3])
    cpus, memory_gb = (float(table.numbers(name, above=0, most=1e9)[0]) for name in names[3:])
    return Cluster((wishes.group(switches * nodes, gpus, cpus, memory_gb * 1e9),), source=path)
