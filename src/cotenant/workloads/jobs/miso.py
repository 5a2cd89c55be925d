"""Reads job traces with the measured latency of each job on every MIG slice (MISO, SoCC'22).

A row is `order, job, model, arrival_s, duration_s, num_iters, launch_s, lat_<slice>...`. `lat_<slice>` are seconds per
iteration on that slice, empty if the job runs out of memory there. `launch_s` is the time of each start and restart.
The work of a job is `num_iters` iterations. Optional columns: `id`, `gpus`, `min_slice` (the smallest slice that the
job may get), `qos_floor` (the lowest speed that the job accepts, as a fraction of its speed on the whole GPU),
`memory_bytes`, `tenant`, `priority`.

A file without latencies is read in the native format. Simulations then use the latencies of each job's model in the
table of measured workloads (profiles/mig/workloads.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cotenant.core.errors import InputError
from cotenant.core.mig import Geometry, geometry, kind_of
from cotenant.core.mig_tables import TABLES
from cotenant.core.work import Floats, Trace
from cotenant.workloads.jobs.native import MAX_ITERATIONS, read_table
from cotenant.workloads.table import MAX_SECONDS, Table
from cotenant.workloads.table_files import read_csv
from cotenant.workloads.trace_options import TraceOptions


@dataclass
class MigLatencies:
    """Latencies of a trace's jobs on MIG slices, in file order.

    `measured_on`: the GPU and its kinds of MIG slices. `latency_s`: seconds per iteration, with a row for each job and
    a column for each of `measured_on.kinds`; NaN if the job runs out of memory on the slice, or was not measured there.
    `launch_s`, `min_slice` ("" if the job states none) and `qos_floor` (a fraction from 0 to 1) have an entry for each
    job and mean the same as the columns of the file.
    """

    measured_on: Geometry
    id: list[str]
    latency_s: Floats
    launch_s: Floats
    min_slice: list[str]
    qos_floor: Floats


def read(path: str, options: TraceOptions) -> Trace:
    """Read the jobs of the file. A job's duration is its time on the whole GPU, one launch included."""
    table = read_csv(path)
    if not _latency_columns(table):
        if "id" not in table.columns:
            raise InputError(
                "the file has neither latencies on MIG slices (columns lat_7g.40gb, ...) nor the native column id",
                file=path,
                line=1,
            )
        return read_table(table, f"miso:{path}")
    geo, columns = measured_on(table)
    iterations = table.numbers("num_iters", least=1, most=MAX_ITERATIONS)
    whole = table.numbers(next(c for c, kind in columns.items() if kind == geo.kinds[0]), above=0, most=MAX_SECONDS)
    launch = table.numbers("launch_s", least=0, most=MAX_SECONDS)
    # this column is not used, but a wrong value in it is reported
    table.numbers("duration_s", optional=True, least=0, most=MAX_SECONDS)
    gpus = table.numbers("gpus", optional=True, least=1, most=100_000, whole=True)
    priority = table.numbers("priority", optional=True, whole=True)
    return table.trace(
        f"miso:{path}",
        id=_ids(table),
        arrival_s=table.numbers("arrival_s", least=0, most=MAX_SECONDS),
        gpus=np.where(np.isnan(gpus), 1.0, gpus),
        duration_s=iterations * whole + launch,
        iterations=iterations,
        model=table.texts("model", optional=True),
        tenant=table.texts("tenant", optional=True),
        priority=np.nan_to_num(priority, nan=0.0),
        memory_bytes=table.numbers("memory_bytes", optional=True, above=0),
    )


def read_latencies(path: str) -> MigLatencies | None:
    """Read the latencies of a trace's jobs on MIG slices; None if the file has no latency columns."""
    table = read_csv(path)
    if not _latency_columns(table):
        return None
    geo, columns = measured_on(table)
    latency = np.full((len(table), len(geo.kinds)), np.nan)
    for column, kind in columns.items():
        latency[:, geo.kinds.index(kind)] = table.numbers(column, optional=True, above=0, most=MAX_SECONDS)
    if "1g+" in geo.kinds and "1g+" not in columns.values() and "1g" in columns.values():
        # a 1g+ instance has the compute slices of a 1g; NaN stays NaN, because a job that runs out of memory on 1g may
        # run on 1g+
        latency[:, geo.kinds.index("1g+")] = latency[:, geo.kinds.index("1g")]
    least = [str(t) for t in table.texts("min_slice", optional=True)]
    for row, text in enumerate(least):
        if text:
            try:
                kind_of(geo, text)
            except InputError as error:
                table.fail(row, "min_slice", error.message)
    floor = table.numbers("qos_floor", optional=True, least=0, most=1)
    launch = table.numbers("launch_s", least=0, most=MAX_SECONDS)
    return MigLatencies(geo, [str(i) for i in _ids(table)], latency, launch, least, np.nan_to_num(floor))


def _latency_columns(table: Table) -> list[str]:
    return [c for c in table.header if c.startswith("lat_")]


def _ids(table: Table) -> np.ndarray:
    for name in ("id", "order"):
        if name in table.columns:
            return table.texts(name)
    return np.array([str(i) for i in range(len(table))], dtype=object)


def measured_on(table: Table) -> tuple[Geometry, dict[str, str]]:
    """Return the GPU whose MIG profiles the latency columns name, and the kind of slice of each column."""
    columns = _latency_columns(table)
    names = [c.removeprefix("lat_") for c in columns]
    for gpu, entry in TABLES.items():
        geo = geometry(gpu, double_memory="1g+" in entry.shapes)
        kinds = {p.name: p.kind for p in geo.profiles.values()}
        if not all(n in kinds for n in names):
            continue
        whole = geo.profiles[geo.kinds[0]].name
        if whole not in names:
            raise InputError(f"a column lat_{whole} (the whole GPU) is needed", file=table.path, line=1)
        return geo, {f"lat_{n}": kinds[n] for n in names}
    every = {p.name for gpu in TABLES for p in geometry(gpu, double_memory=None).profiles.values()}
    for n in names:
        if n not in every:
            raise InputError("is not a MIG profile of a GPU of the catalog", file=table.path, line=1, field=f"lat_{n}")
    raise InputError("the latency columns are of several GPU models", file=table.path, line=1)
