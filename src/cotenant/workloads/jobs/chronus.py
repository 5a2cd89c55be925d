"""Reads traces of Chronus: jobs derived from the Philly trace, with deadlines. The columns are job_id, user, num_gpu,
submit_time, duration, model_name, expect_time_list, best_effort and more.

The files state no time unit. Minutes are the default, because they give the trace a plausible length: 20,151 minutes
are two weeks. `expect_time_list` has one or more times from submission, separated by '-'. A job that ends by the first
one earns its full value, later less (column expect_value_list), so the first time is the deadline. Best-effort jobs
have no deadline.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from cotenant.core.errors import InputError
from cotenant.core.work import Floats, Trace
from cotenant.workloads.jobs.native import MAX_ITERATIONS
from cotenant.workloads.table import MAX_SECONDS, Table
from cotenant.workloads.table_files import read_csv
from cotenant.workloads.trace_options import TraceOptions

UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0}
COLUMNS = (
    "job_id", "user", "num_gpu", "submit_time", "iterations", "model_name", "duration", "expect_time_list",
    "best_effort",
)  # fmt: skip


def read(path: str, options: TraceOptions) -> Trace:
    """Read the jobs of the file. Users (virtual clusters) are the tenants. Rows with 0 GPUs are left out."""
    unit = options.time_unit or "min"
    if unit not in UNITS_S:
        raise InputError(f"unknown time unit {unit!r}; write s, min or h", field="time-unit")
    second = UNITS_S[unit]
    table = read_csv(path, COLUMNS)
    table.require("job_id", "num_gpu", "submit_time", "duration")
    table.leave_out(table.gpu_counts("num_gpu") == 0, "with 0 GPUs")
    if not options.time_unit:
        table.remarks.append("the file states no time unit; minutes assumed (--time-unit s|min|h sets another)")
    arrival_s = table.numbers("submit_time", least=0, most=MAX_SECONDS / second) * second
    return table.trace(
        f"chronus:{path}",
        id=table.texts("job_id"),
        arrival_s=arrival_s,
        gpus=table.gpu_counts("num_gpu"),
        duration_s=table.numbers("duration", above=0, most=MAX_SECONDS / second) * second,
        iterations=table.numbers("iterations", optional=True, above=0, most=MAX_ITERATIONS),
        model=table.texts("model_name", optional=True),
        tenant=table.texts("user", optional=True),
        deadline_s=arrival_s + _expected(table) * second,
    )


def _expected(table: Table) -> Floats:
    """Return the time from submission to the deadline of each job, in the file's unit. NaN for best-effort jobs, and if
    no deadline is stated.
    """
    if "expect_time_list" not in table.columns:
        return np.full(len(table), np.nan)
    written = pl.Series(table.texts("expect_time_list", optional=True).tolist(), dtype=pl.String)
    first = written.str.split("-").list.first().fill_null("")
    allowed = first.cast(pl.Float64, strict=False)
    wrong = (allowed.is_null() & (first != "")).fill_null(False).to_numpy()
    table.refuse(wrong, "expect_time_list", "{} is not a '-'-separated list of times")
    values: Floats = allowed.fill_null(np.nan).to_numpy().copy()
    values[table.numbers("best_effort", optional=True) == 1] = np.nan
    return values
