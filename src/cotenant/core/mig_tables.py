"""MIG profile tables of the GPUs in the catalog, as `nvidia-smi mig -lgip` and `-lgipp` report them.

Sources: NVIDIA's MIG user guide (profiles, counts, placements) and public `-lgip`/`-lgipp` listings of A30, A100-40GB,
A100-80GB, H100 SXM, H100 PCIe, H100 NVL, H200, B200 and GH200 machines (memory in GiB, SM counts). Memory varies by
a few hundred MiB between drivers. `None` stands where no public listing gives a figure: nothing is guessed.
"""

from __future__ import annotations

from typing import NamedTuple

GIB = 1 << 30


class Row(NamedTuple):
    """One profile of one GPU: kind (`1g+` is the double-memory 1g), name, memory in GiB, SMs (None: not published)."""

    kind: str
    name: str
    memory_gib: float
    sms: int | None


class Shape(NamedTuple):
    """What a kind takes of the GPU: compute slices, memory slots, allowed starts, `-lgip` id."""

    compute: int
    memory_slots: int
    starts: tuple[int, ...]
    profile_id: int


class Table(NamedTuple):
    """All profiles of one GPU; `double_memory` says whether `1g+` is offered unless asked otherwise."""

    shapes: dict[str, Shape]
    compute_slices: int
    memory_slots: int
    rows: tuple[Row, ...]
    double_memory: bool
    source: str


SEVEN = {
    "7g": Shape(7, 8, (0,), 0),
    "4g": Shape(4, 4, (0,), 5),
    "3g": Shape(3, 4, (0, 4), 9),
    "2g": Shape(2, 2, (0, 2, 4), 14),
    "1g+": Shape(1, 2, (0, 2, 4, 6), 15),
    "1g": Shape(1, 1, (0, 1, 2, 3, 4, 5, 6), 19),
}
FOUR = {
    "4g": Shape(4, 4, (0,), 0),
    "2g": Shape(2, 2, (0, 2), 5),
    "1g": Shape(1, 1, (0, 1, 2, 3), 14),
}


def _seven(rows: str, *, double_memory: bool = True, source: str) -> Table:
    """Rows are `name:GiB:SMs` in the order 7g 4g 3g 2g 1g+ 1g."""
    parsed = []
    for kind, text in zip(SEVEN, rows.split(), strict=True):
        name, gib, sms = text.split(":")
        parsed.append(Row(kind, name, float(gib), None if sms == "-" else int(sms)))
    return Table(SEVEN, 7, 8, tuple(parsed), double_memory, source)


TABLES: dict[str, Table] = {
    "A30": Table(
        FOUR, 4, 4,
        (Row("4g", "4g.24gb", 23.44, 56), Row("2g", "2g.12gb", 11.69, 28), Row("1g", "1g.6gb", 5.81, 14)),
        False, "-lgip listing of an A30 24GB",
    ),
    "A100-40GB": _seven(
        # 1g.10gb needs driver R525 or newer, so it is offered only when asked for
        "7g.40gb:39.38:98 4g.20gb:19.62:56 3g.20gb:19.62:42 2g.10gb:9.75:28 1g.10gb:9.75:14 1g.5gb:4.75:14",
        double_memory=False, source="-lgip listing of an A100 40GB",
    ),
    "A100-80GB": _seven(
        "7g.80gb:79.00:98 4g.40gb:39.25:56 3g.40gb:39.25:42 2g.20gb:19.50:28 1g.20gb:19.50:14 1g.10gb:9.50:14",
        source="-lgip listing of an A100 80GB",
    ),
    "H100-80GB": _seven(
        "7g.80gb:79.25:132 4g.40gb:39.50:64 3g.40gb:39.50:60 2g.20gb:19.62:32 1g.20gb:19.62:26 1g.10gb:9.75:16",
        source="-lgip listings of H100 SXM5 80GB machines",
    ),
    "H100-PCIe": _seven(
        "7g.80gb:79.25:114 4g.40gb:39.50:62 3g.40gb:39.50:46 2g.20gb:19.62:30 1g.20gb:19.62:14 1g.10gb:9.75:14",
        source="-lgip listing of an H100 PCIe 80GB",
    ),
    "H100-NVL": _seven(
        "7g.94gb:93.12:132 4g.47gb:46.38:64 3g.47gb:46.38:60 2g.24gb:21.62:32 1g.24gb:21.62:26 1g.12gb:10.75:16",
        source="-lgip listing of an H100 NVL 94GB",
    ),
    "H200": _seven(
        "7g.141gb:140.00:132 4g.71gb:69.50:64 3g.71gb:69.50:60 2g.35gb:32.25:32 1g.35gb:32.25:26 1g.18gb:16.00:16",
        source="-lgip listings of H200 141GB machines",
    ),
    "B200": _seven(
        "7g.180gb:177.00:- 4g.90gb:88.50:- 3g.90gb:88.50:- 2g.45gb:44.25:36 1g.45gb:44.25:30 1g.23gb:20.50:18",
        source="-lgip listing of a B200 180GB (3g, 4g, 7g: memory counted as 2, 2, 4 times 2g; SMs not published)",
    ),
    "GH200": _seven(
        "7g.96gb:93.00:132 4g.48gb:46.50:64 3g.48gb:46.50:60 2g.24gb:23.00:32 1g.24gb:23.00:26 1g.12gb:11.00:16",
        source="-lgip listing of a GH200 96GB (1g.12gb: memory taken as somewhat under half of 2g.24gb)",
    ),
}
