"""Reads the job log of Helios (SC'21, SenseTime): cluster_log.csv of a Slurm cluster: job_id, user, vc, gpu_num,
cpu_num, node_num, state, submit_time, start_time, end_time (local, no zone), duration, queue [s].
"""

from __future__ import annotations

from cotenant.core.work import Trace
from cotenant.workloads.jobs.cluster_log import COLUMNS, kept_seconds, make_trace
from cotenant.workloads.table_files import read_csv
from cotenant.workloads.trace_options import TraceOptions


def read(path: str, options: TraceOptions) -> Trace:
    """Read the GPU jobs of the log. A job's virtual cluster is used as its tenant."""
    table = read_csv(path, (*COLUMNS, "vc"))
    table.require("vc")
    run_s = kept_seconds(table)
    return make_trace(table, f"helios:{path}", run_s, tenant=table.texts("vc", optional=True))
