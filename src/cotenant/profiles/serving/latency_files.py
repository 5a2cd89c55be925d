"""Serving profiles as files: Cotenant's own JSON format, and folders in the layout of the data of the public gpulet
scheduler (glet, USENIX ATC 2022). A gpulet is a part of a GPU that serves models.

Cotenant's format is one JSON object: gpu, source, memory_mb, usable, per_gpulet_mb, max_gpulets, margin, partitions
(a map from label to fraction; to {"fraction", "slots"} for a MIG instance; to {"of", "fraction"} or {"of", "processes"}
for a part of another partition), interference (the five coefficients, or absent), aliases, and models (a map from name
to memory_mb, latency_ms {label: {batch: ms}}, overhead_ms {batch: ms}, l2 and dram {batch: 0..1}). MB is 10^6 bytes.
latency.py says what these fields mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from cotenant.core.checked import Strict, check
from cotenant.core.errors import InputError
from cotenant.core.jsonfile import read_json
from cotenant.core.textfile import cell_number, csv_rows
from cotenant.profiles.serving.latency import BLIND, Interference, ModelProfile, Partition, Points, ServingProfile

MB = 10**6
MAX_BATCH = 1024


def shipped_profiles() -> dict[str, str]:
    """Return, by GPU name, the text of each profile that comes with the package."""
    found = {}
    for entry in resources.files("cotenant.profiles").joinpath("data").iterdir():
        if entry.name.startswith("serving-") and entry.name.endswith(".json"):
            text = entry.read_text(encoding="utf-8")
            found[json.loads(text)["gpu"]] = text
    return found


def load_profile(gpu: str, path: str | Path | None = None) -> ServingProfile:
    """Return the serving profile of a GPU type: from `path` (a JSON file, or a folder), else the shipped one. Raises
    InputError if there is none.
    """
    if path is None:
        shipped = shipped_profiles()
        same = {_plain(name): name for name in shipped}
        name = same.get(_plain(gpu))
        if name is None:
            raise InputError(
                f"no serving profile for GPU type {gpu!r}: shipped are {', '.join(sorted(shipped))}; "
                "give one with profile: or --profile",
                field="gpus.model",
            )
        return parse_profile(json.loads(shipped[name]), f"shipped profile {name}")
    where = Path(path)
    if where.is_dir():
        own = where / "profile.json"
        return read_profile(own) if own.exists() else read_gpulet_dir(where, gpu)
    return read_profile(where)


def _plain(gpu: str) -> str:
    return "".join(c for c in gpu.upper() if c.isalnum())


def read_profile(path: Path) -> ServingProfile:
    """Read a serving profile in Cotenant's JSON format."""
    return parse_profile(read_json(path), path)


Amount = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Batches = dict[Annotated[int, Field(ge=1, le=MAX_BATCH)], Amount]


def _as_size(value: Any) -> Any:
    return {"fraction": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


class _Size(Strict):
    fraction: float = Field(default=1.0, gt=0, le=1)
    slots: int = Field(default=0, ge=0, le=64)
    of: str | None = None
    processes: int = Field(default=1, ge=1, le=64)

    @model_validator(mode="after")
    def _whole_or_part(self) -> _Size:
        if self.of is None and (self.processes > 1 or "fraction" not in self.model_fields_set):
            raise ValueError("needs a fraction of the GPU, or `of` with the partition that it is a part of")
        if self.of is not None and (self.slots or ("fraction" in self.model_fields_set) == (self.processes > 1)):
            raise ValueError(
                "a part `of` another partition needs either a fraction of it or a number of processes, and no slots"
            )
        return self


class _Coefficients(Strict):
    l2_self: float = Field(allow_inf_nan=False)
    l2_other: float = Field(allow_inf_nan=False)
    dram_self: float = Field(allow_inf_nan=False)
    dram_other: float = Field(allow_inf_nan=False)
    constant: float = Field(allow_inf_nan=False)


class _Model(Strict):
    memory_mb: Amount
    latency_ms: dict[str, Batches] = Field(min_length=1)
    overhead_ms: Batches = Field(default_factory=dict)
    l2: Batches = Field(default_factory=dict)
    dram: Batches = Field(default_factory=dict)


class _File(Strict):
    gpu: str = Field(min_length=1)
    source: str = Field(min_length=1)
    memory_mb: Amount
    usable: float = Field(default=1.0, gt=0, le=1)
    per_gpulet_mb: Amount = 0.0
    max_gpulets: int = Field(default=2, ge=1, le=64)
    margin: float = Field(default=1.0, gt=0, le=100)
    slots: int = Field(default=0, ge=0, le=64)
    network_gbps: Amount | None = None
    partitions: dict[str, Annotated[_Size, BeforeValidator(_as_size)]] = Field(min_length=1)
    interference: _Coefficients | None = None
    aliases: dict[str, str] = Field(default_factory=dict)
    models: dict[str, _Model] = Field(min_length=1)


def parse_profile(data: Any, file: str | Path) -> ServingProfile:
    """Build a serving profile from the content of a JSON file, checking every value."""
    raw = check(_File, data, file)
    models = {}
    for name, m in raw.models.items():
        unknown = sorted(set(m.latency_ms) - set(raw.partitions))
        if unknown:
            what = f"names partitions that are not declared: {', '.join(unknown)}"
            raise InputError(what, file=file, field=f"models.{name}.latency_ms")
        empty = [label for label, points in m.latency_ms.items() if not points or min(points.values()) <= 0]
        if empty:
            what = "needs the time of at least one batch size; all times must be above 0"
            raise InputError(what, file=file, field=f"models.{name}.latency_ms.{empty[0]}")
        models[name] = ModelProfile(
            name, round(m.memory_mb * MB), {label: _sorted(points) for label, points in m.latency_ms.items()},
            _sorted(m.overhead_ms), _sorted(m.l2), _sorted(m.dram),
        )  # fmt: skip
    inter = raw.interference
    return ServingProfile(
        gpu=raw.gpu,
        source=raw.source,
        memory_bytes=round(raw.memory_mb * MB),
        partitions=_partitions(raw.partitions, file),
        models=models,
        interference=BLIND if inter is None else Interference(**inter.model_dump()),
        usable=raw.usable,
        per_gpulet_bytes=round(raw.per_gpulet_mb * MB),
        max_gpulets=raw.max_gpulets,
        margin=raw.margin,
        slots=raw.slots,
        network_bps=None if raw.network_gbps is None else raw.network_gbps * 1e9,
        aliases=raw.aliases,
    )


def _partitions(sizes: Mapping[str, _Size], file: str | Path) -> tuple[Partition, ...]:
    whole = {label: Partition(x.fraction, label, x.slots) for label, x in sizes.items() if x.of is None}
    for label, size in sizes.items():
        if size.of is not None and size.of not in whole:
            what = f"must name a partition that has no 'of' itself; {size.of!r} is none"
            raise InputError(what, file=file, field=f"partitions.{label}.of")
    parts = [
        whole[x.of].cut(label, x.fraction / x.processes, x.processes) for label, x in sizes.items() if x.of is not None
    ]
    return tuple(sorted([*whole.values(), *parts]))


def _size_content(p: Partition, whole: Sequence[Partition]) -> Any:
    """Return a partition as written in the JSON format."""
    if p in whole:
        return {"fraction": p.fraction, "slots": p.slots} if p.slots else p.fraction
    of = next(w for w in whole if w.instance == p.instance and (p.instance or w.share > 1 - 1e-9))
    return {"of": of.label} | ({"processes": p.processes} if p.processes > 1 else {"fraction": p.share / of.share})


def _sorted(points: Mapping[int, float]) -> Points:
    return tuple(sorted(points.items()))


def profile_to_dict(profile: ServingProfile) -> dict[str, Any]:
    """Return a serving profile as the object of a JSON file; `parse_profile` gives the same profile back."""
    inter = profile.interference
    whole = [p for p in profile.partitions if p.processes == 1 and (not p.slots or p.share > 1 - 1e-9)]
    return {
        "gpu": profile.gpu,
        "source": profile.source,
        "memory_mb": profile.memory_bytes / MB,
        "usable": profile.usable,
        "per_gpulet_mb": profile.per_gpulet_bytes / MB,
        "max_gpulets": profile.max_gpulets,
        "margin": profile.margin,
        "slots": profile.slots,
        "network_gbps": None if profile.network_bps is None else profile.network_bps / 1e9,
        "partitions": {p.label: _size_content(p, whole) for p in profile.partitions},
        "interference": None if inter == BLIND else vars(inter),
        "aliases": dict(profile.aliases),
        "models": {
            m.name: {
                "memory_mb": m.memory_bytes / MB,
                "latency_ms": {label: dict(points) for label, points in m.latency_ms.items()},
                "overhead_ms": dict(m.overhead_ms),
                "l2": dict(m.l2),
                "dram": dict(m.dram),
            }
            for m in profile.models.values()
        },
    }


# ---- the public layout: latency.csv, utilisation.csv, interference-constants.csv, mem-config.json, 3_224_224.txt ----

# Prefix of a model's name, and how long building one of its batches takes: the file with the times by batch size and a
# factor by which they are multiplied, or None and a constant time in ms. The first prefix that matches applies.
_CONCATENATION = (
    ("lenet", None, 0.4),
    ("bert", None, 1.0),
    ("ssd", "3_300_300.txt", 2.5),
    ("", "3_224_224.txt", 1.9),
)
_GPULET_MB, _GPU_MB, _USABLE, _MARGIN = 1230, 11_000, 0.9, 1.1
LENETS = {f"lenet{i}": "lenet1" for i in range(2, 7)}


def _latencies(path: Path) -> dict[str, dict[str, dict[int, float]]]:
    """Read latency.csv into a table model -> partition label -> batch -> ms. The header line is optional."""
    out: dict[str, dict[str, dict[int, float]]] = {}
    for line, row in csv_rows(path):
        if line == 1 and row[0] == "model":
            continue
        if len(row) < 4:
            raise InputError(
                "a row is too short; it must be model,partition_pct,batch,latency_ms", file=path, line=line
            )
        pct, batch = cell_number(row[1], path, line, "partition_pct"), cell_number(row[2], path, line, "batch")
        if not 1 <= batch <= MAX_BATCH:
            raise InputError(f"batch {row[2]} is not 1 to {MAX_BATCH}", file=path, line=line, field="batch")
        if not 0 < pct <= 100:
            raise InputError(f"{row[1]} is not a percentage in (0, 100]", file=path, line=line, field="partition_pct")
        ms = cell_number(row[3], path, line, "latency_ms")
        if ms <= 0:
            raise InputError(f"a latency must be above 0, not {ms:g} ms", file=path, line=line, field="latency_ms")
        out.setdefault(row[0], {}).setdefault(f"{pct:g}%", {})[int(batch)] = ms
    return out


def _utilisations(path: Path) -> dict[str, tuple[Points, Points]]:
    """Read utilisation.csv: model -> (L2, DRAM) utilisation by batch size, as fractions. The result has only the batch
    sizes that are powers of two; `interpolate` gives the values between them.
    """
    table: dict[str, list[tuple[int, float, float]]] = {}
    for line, row in csv_rows(path, 6):
        if line == 1:
            continue
        batch = int(cell_number(row[1], path, line, "batch"))
        if not 1 <= batch <= MAX_BATCH:
            raise InputError(f"batch {batch} is not 1 to {MAX_BATCH}", file=path, line=line, field="batch")
        if batch & (batch - 1) == 0:
            l2, dram = (cell_number(row[k], path, line, "utilisation") / 100 for k in (4, 5))
            table.setdefault("lenet1" if row[0] == "lenet" else row[0], []).append((batch, l2, dram))
    return {
        name: (tuple((b, l2) for b, l2, _ in sorted(rows)), tuple((b, dram) for b, _, dram in sorted(rows)))
        for name, rows in table.items()
    }


def _overhead(folder: Path, name: str) -> Points:
    for prefix, table, factor in _CONCATENATION:
        if name.startswith(prefix):
            if table is None:
                return ((1, factor), (MAX_BATCH, factor))
            path = folder / table
            cells = [[cell_number(x, path, n, "batch, ms") for x in row[:2]] for n, row in csv_rows(path, 2)]
            return tuple(sorted((int(b), ms * factor) for b, ms in cells))
    raise AssertionError("the last prefix matches every name")


def _memory(path: Path) -> dict[str, float]:
    try:
        found = {str(m["name"]): float(m["mem"]) for m in read_json(path)["models"]}
    except (ValueError, KeyError, TypeError):
        raise InputError('is not {"models": [{"name": ..., "mem": MB}, ...]}', file=path) from None
    for name, mb in found.items():
        if not 0 <= mb <= 1e9:
            raise InputError(f"{mb:g} MB is not a memory size", file=path, field=name)
    return found


def read_gpulet_dir(folder: Path, gpu: str = "RTX2080Ti") -> ServingProfile:
    """Read a serving profile from a folder laid out like the data of the public gpulet scheduler. All files but
    latency.csv may be absent.
    """
    latencies = _latencies(folder / "latency.csv")
    if not latencies:
        raise InputError("has no latencies", file=folder / "latency.csv")
    memory: dict[str, float] = {}
    if (folder / "mem-config.json").exists():
        memory = _memory(folder / "mem-config.json")
    utilisation = _utilisations(folder / "utilisation.csv") if (folder / "utilisation.csv").exists() else {}
    inter = BLIND
    constants = folder / "interference-constants.csv"
    if constants.exists():
        if not utilisation:
            raise InputError(
                "needs utilisation.csv in the same folder: without it, no interference between services is predicted",
                file=constants,
            )
        row = next((row for line, row in csv_rows(constants, 5) if line > 1), None)
        if row is None:
            raise InputError("needs a heading and a row of five coefficients", file=constants)
        inter = Interference(*(cell_number(c, constants, 2, "coefficient") for c in row[:5]))
    models = {}
    for name, cells in latencies.items():
        l2, dram = utilisation.get(name, ((), ()))
        overhead = _overhead(folder, name) if (folder / "3_224_224.txt").exists() else ()
        models[name] = ModelProfile(
            name,
            round(memory.get(name, 0.0) * MB),
            {label: tuple(sorted(batches.items())) for label, batches in cells.items()},
            overhead, l2, dram,
        )  # fmt: skip
    labels = {label for cells in latencies.values() for label in cells}
    return ServingProfile(
        gpu=gpu,
        source=f"{folder.name}/latency.csv",
        memory_bytes=round(_GPU_MB * MB),
        partitions=tuple(sorted(Partition(float(label[:-1]) / 100, label) for label in labels)),
        models=models,
        interference=inter,
        usable=_USABLE,
        per_gpulet_bytes=_GPULET_MB * MB,
        margin=_MARGIN,
        aliases={k: v for k, v in LENETS.items() if v in models},
    )
