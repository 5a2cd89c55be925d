"""Reads replay files of the public Synergy simulator: rows of id, model, arrival_s, iterations, gpus, without a header.
"""

from __future__ import annotations

from cotenant.core.work import Trace
from cotenant.workloads.jobs.native import MAX_ITERATIONS
from cotenant.workloads.table import MAX_SECONDS
from cotenant.workloads.table_files import read_csv
from cotenant.workloads.trace_options import TraceOptions

COLUMNS = ("id", "model", "arrival_s", "iterations", "gpus")


def read(path: str, options: TraceOptions) -> Trace:
    """Read the jobs of the file. Arrivals are not shifted to 0, because the public simulator's first round depends on
    them.
    """
    table = read_csv(path, names=COLUMNS)
    gpus = table.gpu_counts("gpus")
    table.refuse(gpus <= 0, "gpus", "{} must be above 0: a job needs at least a part of one GPU")
    return table.trace(
        f"synergy:{path}",
        id=table.texts("id"),
        model=table.texts("model"),
        arrival_s=table.numbers("arrival_s", least=0, most=MAX_SECONDS),
        iterations=table.numbers("iterations", above=0, most=MAX_ITERATIONS),
        gpus=gpus,
    )
