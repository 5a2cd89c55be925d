"""Reads the format of Blox (EuroSys'24): the list of jobs that its submit.py reads: job_id, num_gpus, submit_time,
duration [s], model, batch_size.

Blox's simulator reads other files: its cluster_job_log is Philly's job log (philly-json), and its workload_pollux is
Sia's and Pollux's format (sia).
"""

from __future__ import annotations

from cotenant.core.work import Trace
from cotenant.workloads.table import MAX_SECONDS
from cotenant.workloads.table_files import read_csv
from cotenant.workloads.trace_options import TraceOptions

COLUMNS = ("job_id", "num_gpus", "submit_time", "duration", "model")


def read(path: str, options: TraceOptions) -> Trace:
    """Read the jobs of the file. Rows with 0 GPUs or 0 seconds are left out. The batch size is not used."""
    table = read_csv(path, COLUMNS)
    table.require(*COLUMNS[:4])
    table.leave_out(table.gpu_counts("num_gpus") == 0, "with 0 GPUs")
    table.leave_out(table.numbers("duration", least=0, most=MAX_SECONDS) == 0, "without duration")
    return table.trace(
        f"blox:{path}",
        id=table.texts("job_id"),
        arrival_s=table.numbers("submit_time", least=0, most=MAX_SECONDS),
        gpus=table.gpu_counts("num_gpus"),
        duration_s=table.numbers("duration"),
        model=table.texts("model", optional=True),
    )
