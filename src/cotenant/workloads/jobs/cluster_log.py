"""Common columns of the job logs of Helios and Acme: job_id, user, gpu_num, cpu_num, state, submit_time, start_time,
end_time, duration [s].

A job's run time is end_time minus start_time, whatever its final state. Jobs that never ran are left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from cotenant.core.units import counted
from cotenant.core.work import Floats, Trace
from cotenant.workloads.jobs.clock import clock_seconds
from cotenant.workloads.table import MAX_SECONDS, Table

COLUMNS = ("job_id", "user", "gpu_num", "cpu_num", "state", "submit_time", "start_time", "end_time", "duration")
UNKNOWN = ("", "None", "NaT", "nan", "Unknown")  # spellings of an unknown time in the logs of Helios and Acme
UNTRIED = "the reader follows the published description of the format; it has not been tried on the published data"


def kept_seconds(table: Table) -> Floats:
    """Remove rows that are not finished GPU jobs. Return the run time of each remaining row in seconds."""
    table.require("job_id", "gpu_num", "submit_time", "start_time", "end_time")
    table.leave_out(table.empty("gpu_num"), "without gpu_num")
    table.leave_out(table.gpu_counts("gpu_num") == 0, "with 0 GPUs")
    for name, reason in (
        ("submit_time", "without submit_time"),
        ("start_time", "never started (no start_time)"),
        ("end_time", "without end_time"),
    ):
        table.leave_out(np.isin(table.texts(name, optional=True).astype(str), UNKNOWN), reason)
    run_s = clock_seconds(table, "end_time") - clock_seconds(table, "start_time")
    table.leave_out(run_s < 0, "with an end before the start")
    run_s = run_s[run_s >= 0]
    table.leave_out(run_s == 0, "without duration")
    return run_s[run_s > 0]


def make_trace(table: Table, source: str, run_s: Floats, **columns: Any) -> Trace:
    """Return a trace of the table's jobs. The earliest submission is time 0."""
    submitted = clock_seconds(table, "submit_time")
    cpus = table.numbers("cpu_num", optional=True, least=0)
    stated = table.numbers("duration", optional=True, most=MAX_SECONDS)
    other = int((np.abs(stated - run_s) > 1).sum())
    table.remarks.append(UNTRIED)
    if other:
        rows = counted(other, "row states", "rows state")
        table.remarks.append(f"{rows} a duration that differs from end_time minus start_time; the latter is used")
    remark_counts(table, "state")
    return table.trace(
        source,
        id=table.texts("job_id"),
        arrival_s=submitted - submitted.min() if len(table) else submitted,
        gpus=table.gpu_counts("gpu_num"),
        duration_s=run_s,
        cpus=np.where(cpus > 0, cpus, np.nan),
        **columns,
    )


def remark_counts(table: Table, name: str) -> None:
    """Add a remark with the number of rows for each value of a column."""
    if name not in table.columns or not len(table):
        return
    values = pl.Series(table.texts(name, optional=True).tolist(), dtype=pl.String).replace("", "unknown")
    counts = values.value_counts(sort=True).rows()
    table.remarks.append(f"kept by {name}: " + ", ".join(f"{n:,} {value}" for value, n in counts))
