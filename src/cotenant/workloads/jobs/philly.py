"""Reads Microsoft's Philly trace of 2017 as a job list: timestamp (local, no zone), duration [s], num_gpus, gpu_time
[GPU-s], cluster.

The data of Jeon et al., "Analysis of Large-Scale Multi-Tenant GPU Clusters for DNN Training Workloads", ATC'19.
The list has no job ids and no status: a job's id is its row, from 0, and every row counts as a finished job.
"""

from __future__ import annotations

import numpy as np

from cotenant.core.work import Trace
from cotenant.workloads.jobs.clock import clock_seconds
from cotenant.workloads.table import MAX_SECONDS
from cotenant.workloads.table_files import read_csv
from cotenant.workloads.trace_options import TraceOptions

COLUMNS = ("timestamp", "duration", "num_gpus", "cluster")


def read(path: str, options: TraceOptions) -> Trace:
    """Read the jobs of the list. The virtual cluster is the tenant. The earliest arrival is time 0."""
    table = read_csv(path, COLUMNS)
    table.require("timestamp", "duration", "num_gpus")
    table.leave_out(table.gpu_counts("num_gpus") == 0, "with 0 GPUs")
    table.leave_out(table.numbers("duration", least=0, most=MAX_SECONDS) == 0, "without duration")
    arrival_s = clock_seconds(table, "timestamp")
    return table.trace(
        f"philly:{path}",
        id=np.array([str(row) for row in table.rows.tolist()], dtype=object),
        arrival_s=arrival_s - arrival_s.min() if len(table) else arrival_s,
        gpus=table.gpu_counts("num_gpus"),
        duration_s=table.numbers("duration"),
        tenant=table.texts("cluster", optional=True),
    )
