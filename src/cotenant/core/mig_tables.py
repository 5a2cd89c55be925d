"""MIG profile tables of the GPUs in the catalog, as `nvidia-smi mig -lgip` and `-lgipp` report them.

Sources: NVIDIA's MIG user guide (profiles, counts, media engines) and public `-lgip`/`-lgipp` listings of A30,
A100-40GB, A100-80GB, H100 SXM, H100 PCIe, H100 NVL, H200, B200, GB200, GH200 and RTX PRO 6000 machines (memory in GiB,
SM counts). Memory varies by a few hundred MiB between drivers. `None` stands where no public listing gives a figure;
memory that is not published is computed as the table's `source` states.
"""

from __future__ import annotations

from typing import NamedTuple

GIB = 1 << 30


class Row(NamedTuple):
    """One profile of a MIG instance of one GPU: kind (`1g+` is the double-memory 1g), name, memory in GiB, SMs (None:
    not published).

    `also`: the profile's name with other drivers.
    """

    kind: str
    name: str
    memory_gib: float
    sms: int | None
    also: str = ""


class Shape(NamedTuple):
    """The resources that a kind of MIG instance takes: compute slices, memory slots, allowed starts, `-lgip` id,
    largest number.

    `engines`: numbers of video decoders and of optical flow units that an instance takes. They are left at 0 where they
    never limit which instances fit on one GPU together.
    """

    compute: int
    memory_slots: int
    starts: tuple[int, ...]
    profile_id: int
    most: int = 8
    engines: tuple[int, int] = (0, 0)


class Table(NamedTuple):
    """All profiles of MIG instances of one GPU; `double_memory`: whether `1g+` is offered by default.

    A shape without a row of its own is a variant of a row: `1g+me` is a variant of `1g`.
    """

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
    "1g+me": Shape(1, 1, (0, 1, 2, 3, 4, 5, 6), 20, 1, (0, 1)),
}
FOUR = {
    "4g": Shape(4, 4, (0,), 0),
    "2g": Shape(2, 2, (0, 2), 5),
    "1g": Shape(1, 1, (0, 1, 2, 3), 14),
    "2g+me": Shape(2, 2, (0, 2), 6, 1, (0, 1)),
    "1g+me": Shape(1, 1, (0, 1, 2, 3), 21, 1, (0, 1)),
}
# shapes of the instances of an RTX PRO 6000; at most one instance takes all media engines, and graphics (`+gfx`) takes
# no resources
TWELVE = {
    "4g": Shape(4, 12, (0,), 0, 1, (4, 1)),
    "2g": Shape(2, 6, (0, 6), 5, 2, (2, 0)),
    "1g": Shape(1, 3, (0, 3, 6, 9), 14, 4, (1, 0)),
    "4g+gfx": Shape(4, 12, (0,), 32, 1, (4, 1)),
    "2g+gfx": Shape(2, 6, (0, 6), 35, 2, (2, 0)),
    "2g+me.all": Shape(2, 6, (0, 6), 64, 1, (4, 1)),
    "2g-me": Shape(2, 6, (0, 6), 66, 2),
    "1g+me": Shape(1, 3, (0, 3, 6, 9), 21, 1, (1, 1)),
    "1g+gfx": Shape(1, 3, (0, 3, 6, 9), 47, 4, (1, 0)),
    "1g+me.all": Shape(1, 3, (0, 3, 6, 9), 65, 1, (4, 1)),
    "1g-me": Shape(1, 3, (0, 3, 6, 9), 67, 4),
}


def _seven(rows: str, *, double_memory: bool = True, source: str) -> Table:
    """Return the table of a GPU with seven compute slices. Rows are `name:GiB:SMs` in the order 7g 4g 3g 2g 1g+ 1g; a
    name may be `name/alias`.
    """
    parsed = []
    for kind, text in zip(list(SEVEN)[:6], rows.split(), strict=True):
        name, gib, sms = text.split(":")
        name, _, also = name.partition("/")
        parsed.append(Row(kind, name, float(gib), None if sms == "-" else int(sms), also))
    return Table(SEVEN, 7, 8, tuple(parsed), double_memory, source)


TABLES: dict[str, Table] = {
    "A30": Table(
        FOUR,
        4,
        4,
        (Row("4g", "4g.24gb", 23.44, 56), Row("2g", "2g.12gb", 11.69, 28), Row("1g", "1g.6gb", 5.81, 14)),
        False,
        "-lgip listing of an A30 24GB",
    ),
    "A100-40GB": _seven(
        # 1g.10gb needs driver release 525 or newer, so it is offered only on request
        "7g.40gb:39.38:98 4g.20gb:19.62:56 3g.20gb:19.62:42 2g.10gb:9.75:28 1g.10gb:9.75:14 1g.5gb:4.75:14",
        double_memory=False,
        source="-lgip listing of an A100 40GB",
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
    "H100-96GB": _seven(
        "7g.96gb:93.00:132 4g.48gb:46.50:64 3g.48gb:46.50:60 2g.24gb:23.00:32 1g.24gb:23.00:26 1g.12gb:11.00:16",
        source="the listing of a GH200 96GB, which has the same GPU",
    ),
    "H20": _seven(
        "7g.96gb:93.00:78 4g.48gb:46.50:- 3g.48gb:46.50:- 2g.24gb:23.00:- 1g.24gb:23.00:- 1g.12gb:11.00:-",
        source="profile names of NVIDIA's tables; memory copied from the GH200 96GB (SMs of instances not published)",
    ),
    "GH200-144GB": _seven(
        "7g.144gb:141.00:132 4g.72gb:70.50:64 3g.72gb:70.50:60 2g.36gb:35.25:32 1g.36gb:35.25:26 1g.18gb:17.50:16",
        source="-lgip listing of a GH200 144G HBM3e (3g, 4g, 7g: memory counted as 2, 2, 4 times 2g)",
    ),
    "GB200": _seven(
        "7g.186gb/7g.189gb:182.00:- 4g.93gb/4g.95gb:91.00:- 3g.93gb/3g.95gb:91.00:- 2g.47gb:45.50:38 "
        "1g.47gb:45.50:32 1g.23gb/1g.24gb:20.00:18",
        source="-lgip listings of GB200 machines (3g, 4g, 7g: memory counted as 2, 2, 4 times 2g; SMs not published)",
    ),
    "B300": _seven(
        "7g.269gb:258.00:- 4g.135gb:129.00:- 3g.135gb:129.00:- 2g.67gb:64.50:- 1g.67gb:64.50:- 1g.34gb:29.50:18",
        source="public profile names (memory: 96 % of the size in the name, for 1g 87 %: the smallest fractions in "
        "published listings)",
    ),
    "GB300": _seven(
        "7g.278gb:267.00:- 4g.139gb:133.50:- 3g.139gb:133.50:- 2g.70gb:66.75:- 1g.70gb:66.75:- 1g.35gb:30.50:-",
        source="public profile names (memory: 96 % of the size in the name, for 1g 87 %: the smallest fractions in "
        "published listings)",
    ),
    "RTX-PRO-6000": Table(
        TWELVE,
        4,
        12,
        (Row("4g", "4g.96gb", 95.0, 188), Row("2g", "2g.48gb", 47.38, 94), Row("1g", "1g.24gb", 23.62, 46)),
        False,
        "-lgip and -lgipp listings of an RTX PRO 6000 Blackwell Server Edition",
    ),
}

# PCI device id -> model of the catalog; export variants (A800, H800) have the same layouts
PCI_MODELS: dict[int, str] = {
    0x20B0: "A100-40GB", 0x20B1: "A100-40GB", 0x20F1: "A100-40GB", 0x20F6: "A100-40GB",
    0x20B2: "A100-80GB", 0x20B5: "A100-80GB", 0x20F3: "A100-80GB", 0x20F5: "A100-80GB",
    0x20B7: "A30",
    0x2330: "H100-80GB", 0x2324: "H100-80GB", 0x2331: "H100-PCIe", 0x2322: "H100-PCIe",
    0x2321: "H100-NVL", 0x233A: "H100-NVL", 0x233D: "H100-96GB", 0x2329: "H20",
    0x2335: "H200", 0x233B: "H200", 0x2342: "GH200", 0x2348: "GH200-144GB",
    0x2901: "B200", 0x2941: "GB200", 0x3182: "B300", 0x31C2: "GB300", 0x2BB5: "RTX-PRO-6000",
}  # fmt: skip
