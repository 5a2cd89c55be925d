"""Reads job traces of Gavel (OSDI'20): rows of cells separated by tabs, without a header. Versions differ in the number
of cells:

    6    model, command, argument for the steps, steps, arrival [s], GPUs
    7    model, command, argument for the steps, needs data (0 or 1), steps, arrival [s], GPUs
    10   model, command, folder, argument for the steps, needs data, steps, GPUs, weight, SLO, arrival [s]

Models have the names of the public throughput table (`simulate --policy gavel`). Commands are not used.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from cotenant.core.errors import InputError
from cotenant.core.units import counted
from cotenant.core.work import Floats, Trace
from cotenant.workloads.downloads import check_text
from cotenant.workloads.jobs.native import MAX_ITERATIONS
from cotenant.workloads.table import MAX_SECONDS, OtherFormatError, Table, check_path
from cotenant.workloads.trace_options import TraceOptions

LAYOUTS = {
    6: ("model", "command", "argument", "steps", "arrival", "gpus"),
    7: ("model", "command", "argument", "data", "steps", "arrival", "gpus"),
    10: ("model", "command", "folder", "argument", "data", "steps", "gpus", "weight", "slo", "arrival"),
}
USED = ("model", "steps", "arrival", "gpus", "weight", "slo")
MAX_WEIGHT = 1e6


def read(path: str, options: TraceOptions) -> Trace:
    """Read the jobs of the file. A job's id is its row, from 0. Rows with 0 GPUs or 0 steps are left out."""
    table = _table(path)
    table.leave_out(table.gpu_counts("gpus") == 0, "with 0 GPUs")
    table.leave_out(table.numbers("steps", least=0, most=MAX_ITERATIONS) == 0, "without steps")
    slo = table.numbers("slo", optional=True)
    bound = int((slo > 0).sum())
    if bound:
        jobs = counted(bound, "job has", "jobs have")
        table.remarks.append(f"{jobs} an SLO, a multiple of a run time that the file does not state; not used")
    return table.trace(
        f"gavel:{path}",
        id=np.array([str(row) for row in table.rows.tolist()], dtype=object),
        arrival_s=table.numbers("arrival", least=0, most=MAX_SECONDS),
        gpus=table.gpu_counts("gpus"),
        iterations=table.numbers("steps"),
        model=table.texts("model"),
        priority=_priorities(table),
    )


def _priorities(table: Table) -> Floats:
    """Return the priority of each job, its weight minus 1, because `--policy gavel` uses 1 + priority as the weight of
    a job.
    """
    weight = table.numbers("weight", optional=True, above=0, most=MAX_WEIGHT)
    weight = np.where(np.isnan(weight), 1.0, weight)
    broken = int((weight != np.round(weight)).sum())
    if broken:
        jobs = counted(broken, "job has", "jobs have")
        table.remarks.append(f"{jobs} a weight that is not a whole number; rounded to at least 1")
    priorities: Floats = np.maximum(np.round(weight), 1.0) - 1.0
    return priorities


def _table(path: str) -> Table:
    found = check_path(path)
    check_text(found)
    try:
        lines = found.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise InputError("the file is not UTF-8 text", file=path) from None
    rows = [line.rstrip("\r").split("\t") for line in lines]
    if not rows[-1][0] and len(rows[-1]) == 1:
        rows.pop()
    first = next((row for row in rows if row != [""]), None)
    if first is None:
        raise InputError("the trace is empty", file=path)
    if len(first) == 1:
        error = OtherFormatError("the cells of Gavel's traces are separated by tabs; this file has none", file=path)
        error.header = tuple(cell.strip() for cell in first[0].split(","))
        raise error
    layout = LAYOUTS.get(len(first))
    for number, row in enumerate(rows, start=1):
        if row != [""] and (layout is None or len(row) != len(layout)):
            wanted = "6, 7 or 10" if layout is None else f"{len(layout)}, as the first one"
            message = f"the row has {len(row)} cells separated by tabs instead of {wanted}"
            raise InputError(message, file=path, line=number)
    assert layout is not None
    columns = {
        name: [row[i].strip() or None if len(row) > 1 else None for row in rows]
        for i, name in enumerate(layout)
        if name in USED
    }
    return Table(path, pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.String)), header=False)
