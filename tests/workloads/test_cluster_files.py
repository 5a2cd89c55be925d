"""Every way to write a cluster."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from cotenant.core.errors import InputError
from cotenant.workloads.clusters.forms import parse_cluster


def test_short_form_with_defaults_and_options() -> None:
    cluster = parse_cluster("16x8")
    (group,) = cluster.groups
    assert (group.count, group.gpus, group.gpu.name) == (16, 8, "A100-40GB")
    assert (group.cpus, group.memory_bytes, group.storage_mbps) == (24.0, 500_000_000_000, 500.0)
    (group,) = parse_cluster("2x4", gpu="H100", cpus_per_node=96, memory_per_node="1TiB", storage_mbps=2000).groups
    assert (group.gpu.name, group.cpus, group.memory_bytes, group.storage_mbps) == ("H100-80GB", 96, 2**40, 2000)


def test_yaml(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "nodes:\n"
        "  - {count: 16, gpus: 8, gpu: H100-80GB, cpus: 96, memory: 1TiB, storage_mbps: 2000}\n"
        "  - {count: 4, gpus: 2, gpu: A30, cpus: 32, memory: 256GiB}\n"
        "  - {gpus: 4}\n"
    )
    a, b, c = parse_cluster(str(path), gpu="T4").groups
    assert (a.count, a.gpus, a.gpu.name, a.cpus, a.memory_bytes, a.storage_mbps) == (
        16, 8, "H100-80GB", 96, 2**40, 2000,
    )  # fmt: skip
    assert (b.count, b.gpu.name, b.memory_bytes, b.storage_mbps) == (4, "A30", 256 * 2**30, 500)
    # values that the file does not state come from the options and from the defaults per GPU
    assert (c.count, c.gpu.name, c.cpus, c.memory_bytes) == (1, "T4", 12, 250_000_000_000)


@pytest.mark.parametrize(
    ("text", "line", "field", "message"),
    [
        ("nodes:\n  - count: 3\n    gpus: 2\n    gpu: A31\n", 4, "nodes[0].gpu", "unknown GPU model 'A31'"),
        ("nodes:\n  - {gpus: 2}\n  - {gpus: -1}\n", 3, "nodes[1].gpus", "-1 is less than 0"),
        ("nodes:\n  - {gpus: 2, memory: 3parsec}\n", 2, "nodes[0].memory", "unknown memory unit 'parsec'"),
        ("nodes:\n  - {gpus: 2, cpu: 4}\n", 2, "nodes[0].cpu", "unknown setting 'cpu'; did you mean cpus?"),
        ("nodes:\n  - {count: 2}\n", 2, "nodes[0].gpus", "is missing"),
        ("nodes: []\n", 1, "nodes", "at least 1 entry"),
        ("servers: 3\n", 1, "servers", "unknown setting 'servers'; known: nodes"),
        ("", None, "nodes", "is missing"),
        ("nodes: [\n", 2, None, "not valid YAML"),
        ("nodes:\n  - {count: 2, gpus: 0}\n", None, None, "the cluster has no GPUs"),
        ("- 1\n", 1, None, "is not a set of keys"),
        ("nodes:\n  - {gpus: 2, count: true}\n", 2, "nodes[0].count", "true is not a number"),
        ("nodes:\n  - gpus: 2\n    memory: false\n", 3, "nodes[0].memory", "False is not a quantity"),
        ("nodes:\n  - gpus: 2\n    cpus: 4\n    gpus: 8\n", 4, "gpus", "gpus is already given on line 2"),
        ("nodes: [{gpus: 1}]\n\nnodes: [{gpus: 2}]\n", 3, "nodes", "nodes is already given on line 1"),
    ],
)
def test_bad_yaml(tmp_path: Path, text: str, line: int | None, field: str | None, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        parse_cluster(str(path))
    error = caught.value
    assert message in error.message
    assert (error.line, error.field, error.file) == (line, field, str(path))
    assert "\n" not in str(error)


def test_aliases_are_no_repeated_keys(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("nodes:\n  - &big {gpus: 8, cpus: 96}\n  - *big\n  - {<<: *big, gpus: 4}\n")
    assert [(g.gpus, g.cpus) for g in parse_cluster(str(path)).groups] == [(8, 96), (8, 96), (4, 96)]


@pytest.mark.parametrize("kind", ["openb", "alibaba-spot", "tiresias", "synergy-ini"])
def test_no_file_named(kind: str) -> None:
    with pytest.raises(InputError, match=f"'{kind}:' names no file; write {kind}:FILE"):
        parse_cluster(f"{kind}:")


INI = """# comment
[CLUSTER]
racks = 1
servers_per_rack = 16   ; sixteen
gpus_per_server = 8
cpus_per_server = 32
dram_per_server = 500
sspeed_per_server = 500
net_per_server = 40
[SCHEDULER]
policy = FIFO
"""


def test_synergy_ini(tmp_path: Path) -> None:
    path = tmp_path / "c.ini"
    path.write_text(INI)
    (group,) = parse_cluster(f"synergy-ini:{path}").groups
    assert (group.count, group.gpus, group.cpus, group.memory_bytes, group.storage_mbps) == (
        16, 8, 32, 500_000_000_000, 500,
    )  # fmt: skip
    (group,) = parse_cluster(f"synergy-ini:{path}", cpus_per_node=24, gpu="V100").groups
    assert (group.cpus, group.gpu.name) == (24, "V100-16GB")
    # The public simulator's own defaults are 24 CPUs, 500 GB, 300 MB/s and 8 GPUs.
    path.write_text("[CLUSTER]\nservers_per_rack=3\nracks=2\n")
    (group,) = parse_cluster(f"synergy-ini:{path}").groups
    assert (group.count, group.gpus, group.cpus, group.memory_bytes, group.storage_mbps) == (
        6, 8, 24, 500_000_000_000, 300,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line", "field", "message"),
    [
        (INI.replace("= 32", "= many"), 6, "cpus_per_server", "'many' is not a number above 0"),
        (INI.replace("= 8", "= 2.5"), 5, "gpus_per_server", "'2.5' is not a whole number above 0"),
        (INI.replace("servers_per_rack = 16   ; sixteen", ""), None, "servers_per_rack", "is missing"),
        ("[RACKS]\n", None, None, "no section [CLUSTER]"),
        ("racks = 1\n", 1, None, "no section"),
        ("[CLUSTER]\nracks\n", 2, None, "not KEY = VALUE"),
    ],
)
def test_bad_ini(tmp_path: Path, text: str, line: int | None, field: str | None, message: str) -> None:
    path = tmp_path / "c.ini"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        parse_cluster(f"synergy-ini:{path}")
    assert message in caught.value.message
    assert (caught.value.line, caught.value.field) == (line, field)


def test_alibaba_spot_node_list(tmp_path: Path) -> None:
    path = tmp_path / "n.csv"
    path.write_text(
        "gpu_model,gpu_capacity_num,cpu_num,node_name\nA10,1,128,0\nH800,8,192,1\nA10,1,128,2\nA10,0,128,3\n"
        "GPU-series-2,8,192,4\n"
    )
    notes: list[str] = []
    a, b, c = parse_cluster(f"alibaba-spot:{path}", remarks=notes).groups
    assert (a.count, a.gpus, a.gpu.name, a.cpus, a.memory_bytes) == (2, 1, "A10", 128, 62_500_000_000)
    assert (b.count, b.gpus, b.gpu.name, b.cpus, b.memory_bytes) == (1, 8, "H100-80GB", 192, 500_000_000_000)
    assert c.gpu.name == "H20"
    assert notes[0] == "1 node without GPUs left out of the cluster"
    assert "states no memory" in notes[1]
    (one, *_) = parse_cluster(f"alibaba-spot:{path}", memory_per_node="1TiB").groups
    assert one.memory_bytes == 2**40
    with pytest.raises(InputError, match="leave --cpus-per-node out"):
        parse_cluster(f"alibaba-spot:{path}", cpus_per_node=4)


def test_openb_node_list(tmp_path: Path) -> None:
    path = tmp_path / "n.csv"
    path.write_text(
        "sn,cpu_milli,memory_mib,gpu,model\nn0,64000,262144,2,P100\nn1,32000,262144,0,\n"
        "n2,96000,393216,8,G2\nn3,64000,262144,2,P100\n"
    )
    notes: list[str] = []
    a, b = parse_cluster(f"openb:{path}", remarks=notes).groups
    assert (a.count, a.gpus, a.gpu.name, a.cpus, a.memory_bytes) == (2, 2, "P100", 64, 2**38)
    assert (b.count, b.gpus, b.gpu.name, b.cpus, b.memory_bytes) == (1, 8, "A10", 96, 393216 * 2**20)
    assert notes == ["1 node without GPUs left out of the cluster"]
    with pytest.raises(InputError, match="leave --gpu out"):
        parse_cluster(f"openb:{path}", gpu="T4")
    path.write_text("sn,cpu_milli,memory_mib,gpu,model\nn0,64000,262144,2,P100\nn1,64000,262144,2,P101\n")
    with pytest.raises(InputError, match="line 3, field model: unknown GPU model 'P101'"):
        parse_cluster(f"openb:{path}")


@pytest.mark.parametrize("name", ["all_node", "gpu_node"])
def test_real_openb_nodes(shared: Path, name: str) -> None:
    path = shared / f"data/jobs/openb/openb_node_list_{name}.csv"
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["gpu"] != "0"]
    cluster = parse_cluster(f"openb:{path}")
    assert cluster.total_gpus == sum(int(row["gpu"]) for row in rows) == 6_212
    assert cluster.total_nodes == len(rows)
    assert cluster.total_cpus == sum(int(row["cpu_milli"]) for row in rows) / 1000
    assert cluster.total_memory_bytes == sum(int(row["memory_mib"]) for row in rows) * 2**20


def test_real_tiresias_clusters(shared: Path) -> None:
    folder = shared / "data/jobs/tiresias"
    (group,) = parse_cluster(f"tiresias:{folder / 'n160g8.csv'}").groups
    assert (group.count, group.gpus, group.cpus, group.memory_bytes) == (160, 8, 128, 256_000_000_000)
    (group,) = parse_cluster(f"tiresias:{folder / 'n1g4.csv'}").groups
    assert (group.count, group.gpus) == (1, 4)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("16x", "is not a cluster"),
        ("0x8", "'0x8': the cluster has no GPUs"),
        ("16x0", "'16x0': the cluster has no GPUs"),
        ("16x99999", "GPUs per node, not 99,999"),
        ("99999999x8", "must be between 1 and 1,000,000 nodes, not 99,999,999"),
        ("absent.yaml", "No such file"),
        ("synergy-ini:absent.ini", "No such file"),
        ("openb:absent.csv", "No such file"),
    ],
)
def test_bad_specs(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_cluster(spec)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"gpu": "H1000"}, "gpu"),
        ({"cpus_per_node": 0}, "cpus-per-node"),
        ({"memory_per_node": "0GB"}, "memory-per-node"),
        ({"memory_per_node": "5 bananas"}, "memory-per-node"),
        ({"memory_per_node": "500"}, "memory-per-node"),
        ({"memory_per_node": 500}, "memory-per-node"),
        ({"storage_mbps": -1}, "storage-mbps"),
    ],
)
def test_bad_options(options: dict[str, object], field: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_cluster("16x8", **options)  # type: ignore[arg-type]
    assert caught.value.field == field
