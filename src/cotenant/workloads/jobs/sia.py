"""Reads workloads of the simulators of Pollux (OSDI'21) and Sia (SOSP'23): name, time [s], application, num_replicas,
batch_size and, in some, category.

The files state no durations. A job trains its application to the end, and the application's profile states the amount
of work (`simulate --policy sia`).
"""

from __future__ import annotations

import numpy as np

from cotenant.core.work import Trace
from cotenant.workloads.table import MAX_SECONDS
from cotenant.workloads.table_files import read_csv
from cotenant.workloads.trace_options import TraceOptions

COLUMNS = ("name", "time", "application", "num_replicas")


def read(path: str, options: TraceOptions) -> Trace:
    """Read the jobs of the file. A job's number of GPUs is num_replicas. Schedulers that choose the number of GPUs of a
    job themselves may use another number. The batch size is not used.
    """
    table = read_csv(path, COLUMNS)
    table.require(*COLUMNS)
    table.leave_out(table.gpu_counts("num_replicas") == 0, "with 0 GPUs")
    if not options.durations:
        table.remarks.append(
            "the file states no run times: with simulate --policy sia, profiles state the work of a job; otherwise "
            "--durations draws run times"
        )
    return table.trace(
        f"sia:{path}",
        id=table.texts("name"),
        arrival_s=table.numbers("time", least=0, most=MAX_SECONDS),
        gpus=table.gpu_counts("num_replicas"),
        duration_s=np.full(len(table), np.nan),
        model=table.texts("application"),
    )
