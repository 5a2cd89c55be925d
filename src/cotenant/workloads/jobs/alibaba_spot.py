"""Reads Alibaba's job trace of 2026 (GFS, ASPLOS'26): job_info_df.csv of 4,278 GPU nodes with guaranteed (HP) and spot
jobs: job_name, organization, gpu_model, cpu_request and gpu_request of each worker, worker_num, submit_time, duration
[s], job_type.

HP jobs get priority 1 and spot jobs 0, which `simulate --policy spot` expects. `--cluster
alibaba-spot:node_info_df.csv` reads the list of nodes.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from cotenant.core.errors import InputError
from cotenant.core.gpus import find_gpu
from cotenant.core.units import counted
from cotenant.core.work import Names, Trace
from cotenant.workloads.jobs.cluster_log import UNTRIED, remark_counts
from cotenant.workloads.table import MAX_GPUS_PER_JOB, MAX_SECONDS, Table
from cotenant.workloads.table_files import read_csv
from cotenant.workloads.trace_options import TraceOptions

REQUIRED = ("job_name", "gpu_request", "worker_num", "submit_time", "duration", "job_type")
ANONYMOUS = ("GPU-series-1", "GPU-series-2")
COLUMNS = (*REQUIRED, "organization", "gpu_model", "cpu_request")


def read(path: str, options: TraceOptions) -> Trace:
    """Read the jobs of the file. The organization is the tenant. The trace states GPUs and CPUs per worker; they are
    multiplied by the number of workers.
    """
    table = read_csv(path, COLUMNS)
    table.require(*REQUIRED)
    each, workers = table.gpu_counts("gpu_request"), table.numbers("worker_num", least=0, whole=True)
    table.leave_out(each * workers == 0, "with 0 GPUs")
    each, workers = table.gpu_counts("gpu_request"), table.numbers("worker_num")
    table.leave_out((each < 1) & (workers > 1), "with several workers on a part of a GPU each")
    table.leave_out(table.numbers("duration", least=0, most=MAX_SECONDS) == 0, "without duration")
    kind = table.texts("job_type")
    table.refuse(~np.isin(kind.astype(str), ("HP", "Spot")), "job_type", "{} is neither HP nor Spot")
    gpus, workers = table.gpu_counts("gpu_request"), table.numbers("worker_num")
    table.refuse(gpus * workers > MAX_GPUS_PER_JOB, "worker_num", "{} workers need more GPUs than a job may have")
    cpus = table.numbers("cpu_request", optional=True, least=0) * workers
    table.remarks.append(UNTRIED)
    remark_counts(table, "job_type")
    return table.trace(
        f"alibaba-spot:{path}",
        id=table.texts("job_name"),
        arrival_s=table.numbers("submit_time", least=0, most=MAX_SECONDS),
        gpus=gpus * workers,
        duration_s=table.numbers("duration"),
        tenant=table.texts("organization", optional=True),
        priority=(kind == "HP").astype(np.int64),
        cpus=np.where(cpus > 0, cpus, np.nan),
        gpu_models=_models(table),
    )


def _models(table: Table) -> Names:
    """Return for each job the name of its GPU model in the GPU catalog (core/gpus.py); "" if it states none."""
    written = table.texts("gpu_model", optional=True)
    known = {"": ""}
    hidden = int(np.isin(written.astype(str), ANONYMOUS).sum())
    if hidden:
        asks = counted(hidden, "job asks", "jobs ask")
        table.remarks.append(f"{asks} for GPU-series-1 or 2, which are anonymous; they are taken as L40S and H20")
    for row, name in enumerate(written.tolist()):
        if name not in known:
            try:
                known[name] = find_gpu(name).name
            except InputError as error:
                table.fail(row, "gpu_model", error.message)
    models = pl.Series(written.tolist(), dtype=pl.String).replace(known)
    return np.array(models.to_list(), dtype=object).reshape(len(written))
