"""Reads job traces of Tiresias (NSDI'19): job_id, num_gpu, submit_time [s], duration [s]; optionally model_name and
iterations.
"""

from __future__ import annotations

from cotenant.core.work import Trace
from cotenant.workloads.jobs.native import MAX_ITERATIONS
from cotenant.workloads.table import MAX_SECONDS
from cotenant.workloads.table_files import read_csv
from cotenant.workloads.trace_options import TraceOptions

COLUMNS = ("job_id", "num_gpu", "submit_time", "iterations", "model_name", "duration")


def read(path: str, options: TraceOptions) -> Trace:
    """Read the jobs of the file. Rows with 0 GPUs are left out."""
    table = read_csv(path, COLUMNS)
    table.require("job_id", "num_gpu", "submit_time", "duration")
    table.leave_out(table.gpu_counts("num_gpu") == 0, "with 0 GPUs")
    return table.trace(
        f"tiresias:{path}",
        id=table.texts("job_id"),
        arrival_s=table.numbers("submit_time", least=0, most=MAX_SECONDS),
        gpus=table.gpu_counts("num_gpu"),
        duration_s=table.numbers("duration", above=0, most=MAX_SECONDS),
        iterations=table.numbers("iterations", optional=True, above=0, most=MAX_ITERATIONS),
        model=table.texts("model_name", optional=True),
    )
