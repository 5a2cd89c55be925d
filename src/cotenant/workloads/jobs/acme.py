"""Reads the job logs of Acme (NSDI'24, Shanghai AI Laboratory), trace_seren.csv and trace_kalos.csv: job_id, user,
node_num, gpu_num, cpu_num, type, state, submit_time, start_time, end_time (with a zone), duration, queue, gpu_time [s];
Kalos also has mem_per_pod_GB.

In the published examples of Kalos the duration counts from submission, unlike in the format's description.
"""

from __future__ import annotations

import numpy as np

from cotenant.core.work import Trace
from cotenant.workloads.jobs.cluster_log import COLUMNS, kept_seconds, make_trace, remark_counts
from cotenant.workloads.table_files import read_csv
from cotenant.workloads.trace_options import TraceOptions

GB = 10**9


def read(path: str, options: TraceOptions) -> Trace:
    """Read the GPU jobs of the log. The user is the tenant. Each node has one pod, so memory is mem_per_pod_GB times
    the number of nodes."""
    table = read_csv(path, (*COLUMNS, "type", "node_num", "mem_per_pod_GB"))
    table.require("type")
    run_s = kept_seconds(table)
    per_pod = table.numbers("mem_per_pod_GB", optional=True, least=0)
    memory = per_pod * table.numbers("node_num", optional=True, least=0) * GB
    remark_counts(table, "type")
    return make_trace(
        table,
        f"acme:{path}",
        run_s,
        tenant=table.texts("user", optional=True),
        memory_bytes=np.where(memory > 0, memory, np.nan),
    )
