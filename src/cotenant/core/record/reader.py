"""Reads a run's record and checks that it is complete."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from cotenant.core.errors import InputError
from cotenant.core.record.record import Events, Placements, Record
from cotenant.core.record.schema import (
    EVENTS,
    EVENTS_FILE,
    JOBS,
    JOBS_FILE,
    ROUNDS,
    ROUNDS_FILE,
    RUN_FILE,
    SCHEMA_VERSION,
    RunInfo,
)

_SCALARS = [name for name in EVENTS if name not in ("nodes", "node_gpus")]


def read_record(path: str | Path) -> Record:
    """Read the record in folder `path`.

    Raises InputError if it is missing, is not a record, was written by a newer version, or is truncated. Node lists are
    loaded on first use.
    """
    folder = Path(path)
    info = read_info(folder)
    jobs = _table(folder / JOBS_FILE, JOBS)
    rounds = _table(folder / ROUNDS_FILE, ROUNDS)
    frame = _table(folder / EVENTS_FILE, EVENTS, _SCALARS)
    events = Events(**{name: frame[name].to_numpy() for name in _SCALARS})
    if len(events) and not 0 <= int(events.job.min()) <= int(events.job.max()) < jobs.height:
        raise InputError(f"names jobs that are not in {JOBS_FILE}; the record is damaged", file=folder / EVENTS_FILE)
    if not info.placements:
        return Record(info, jobs, events, rounds, folder)
    return Record(info, jobs, events, rounds, folder, lambda: _placements(folder / EVENTS_FILE))


def is_record(path: str | Path) -> bool:
    """Whether `path` is a folder with the record of a run."""
    return (Path(path) / RUN_FILE).is_file()


def find_records(path: str | Path) -> list[Path]:
    """Return the folders of runs' records at or below `path`, sorted by name, without hidden folders. Raises InputError
    if there are none.
    """
    folder = Path(path)
    if is_record(folder):
        return [folder]
    if not folder.exists():
        raise InputError("no such folder", file=path)
    runs = sorted(
        found.parent
        for found in folder.rglob(RUN_FILE)
        if not any(part.startswith(".") for part in found.relative_to(folder).parts)
    )
    if not runs:
        raise InputError(f"contains no run (a run is a folder with {RUN_FILE} in it)", file=path)
    return runs


def read_info(path: str | Path) -> RunInfo:
    """Read only run.json of a record. Raises the same errors as `read_record`."""
    folder = Path(path)
    file = folder / RUN_FILE
    if not folder.is_dir():
        raise InputError("no such folder" if not folder.exists() else "is a file; a run is a folder", file=path)
    if not file.is_file():
        # the runs of a sweep are up to two levels below its folder
        below = (*folder.glob(f"*/{RUN_FILE}"), *folder.glob(f"*/*/{RUN_FILE}"))
        within = min(below, default=None)
        hint = (
            f", but contains some; name one of them, such as {within.parent}" if within else f": it has no {RUN_FILE}"
        )
        raise InputError(f"is not a run{hint}", file=path)
    try:
        loaded: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"is not readable as JSON: {error}", file=file) from error
    version = loaded.get("schema_version") if isinstance(loaded, dict) else None
    if not isinstance(version, int) or not isinstance(loaded.get("label"), str):
        raise InputError("is not from a run of cotenant: it has no label and schema_version", file=file)
    if version > SCHEMA_VERSION:
        raise InputError(
            f"was written by a newer cotenant (record version {version}; this version reads up to {SCHEMA_VERSION})",
            file=file,
            field="schema_version",
        )
    _check_info(loaded, file)
    known = {f.name for f in fields(RunInfo)}
    return RunInfo(**{name: value for name, value in loaded.items() if name in known})


def _check_info(loaded: dict[str, Any], file: Path) -> None:
    """Raise InputError if a field of run.json has another type than this program writes."""
    kinds: dict[str, Any] = {"options": dict, "trace": dict, "cluster": dict, "placements": bool, "seed": int | None}
    amounts = ("nodes", "gpus", "cpus", "memory_bytes")
    for name, kind in kinds.items():
        if name in loaded and not isinstance(loaded[name], kind):
            raise InputError(f"{loaded[name]!r} is not a valid value; the record is damaged", file=file, field=name)
    cluster = loaded.get("cluster", {})
    node_gpus = cluster.get("node_gpus", [])
    if not isinstance(node_gpus, list) or not all(isinstance(n, int | float) for n in node_gpus):
        raise InputError("is not a list of numbers; the record is damaged", file=file, field="cluster.node_gpus")
    for name in amounts:
        if not isinstance(cluster.get(name, 0), int | float):
            raise InputError(f"{cluster[name]!r} is not a number", file=file, field=f"cluster.{name}")


def _table(file: Path, schema: dict[str, pl.DataType], columns: list[str] | None = None) -> pl.DataFrame:
    if not file.is_file():
        raise InputError("is missing; the record is incomplete", file=file)
    try:
        found = pl.read_parquet_schema(file)
        for name, dtype in schema.items():
            if found.get(name) != dtype:
                have = f"is {found[name]}" if name in found else "is missing"
                raise InputError(f"column {have}, expected {dtype}", file=file, field=name)
        # with memory_map the file would stay open, although the next run may replace its folder
        return pl.read_parquet(file, columns=columns or list(schema), memory_map=False)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise InputError(f"is not a complete Parquet file: {str(error).splitlines()[0]}", file=file) from error


def _placements(file: Path) -> Placements:
    frame = _table(file, EVENTS, ["nodes", "node_gpus"])
    counts = frame["nodes"].list.len().fill_null(0).to_numpy()
    offset = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offset[1:])
    flat = {name: frame[name].explode(empty_as_null=False, keep_nulls=False).to_numpy() for name in frame.columns}
    if len(flat["nodes"]) != offset[-1] or len(flat["node_gpus"]) != offset[-1]:
        raise InputError("nodes and node_gpus differ in length; the record is damaged", file=file)
    return Placements(offset, flat["nodes"], flat["node_gpus"])
