"""Reads job traces in the native format: a CSV or Parquet file whose columns have the names of the attributes of
`core.work.Jobs`. Every row must be a valid job.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cotenant.core.errors import InputError
from cotenant.core.gpus import find_gpu
from cotenant.core.work import Names, Trace
from cotenant.workloads.table import MAX_SECONDS, Table
from cotenant.workloads.table_files import read_csv, read_parquet
from cotenant.workloads.trace_options import TraceOptions

COLUMNS = (
    "id", "arrival_s", "gpus", "duration_s", "iterations", "model",
    "tenant", "priority", "cpus", "memory_bytes", "deadline_s", "gpu_models",
)  # fmt: skip
MAX_ITERATIONS = 2.0**53  # floats represent all whole numbers up to this one exactly


def read(path: str, options: TraceOptions) -> Trace:
    """Read the jobs of a native file. InputError with line and field for a row that is not a valid job."""
    parquet = Path(path).suffix.lower() in (".parquet", ".pq")
    table = read_parquet(path, COLUMNS) if parquet else read_csv(path, COLUMNS)
    return read_table(table, f"native:{path}")


def read_table(table: Table, source: str) -> Trace:
    """Return a trace from the native columns of a table."""
    table.require("id", "arrival_s", "gpus", *([] if "iterations" in table.columns else ["duration_s"]))
    unused = [name for name in table.header if name not in COLUMNS]
    if unused:
        table.remarks.append(f"columns not used: {', '.join(unused)}")
    gpus = table.gpu_counts("gpus")
    table.refuse(gpus <= 0, "gpus", "{} must be above 0: a job needs at least a part of one GPU")
    duration_s = table.numbers("duration_s", optional=True, above=0, most=MAX_SECONDS)
    iterations = table.numbers("iterations", optional=True, above=0, most=MAX_ITERATIONS)
    workless = np.isnan(duration_s) & np.isnan(iterations)
    table.refuse(workless, "duration_s", "neither duration_s nor iterations is given; a job needs one of them")
    priority = table.numbers("priority", optional=True, least=-(2.0**53), most=2.0**53, whole=True)
    return table.trace(
        source,
        id=table.texts("id"),
        arrival_s=table.numbers("arrival_s", least=0, most=MAX_SECONDS),
        gpus=gpus,
        duration_s=duration_s,
        iterations=iterations,
        model=table.texts("model", optional=True),
        tenant=table.texts("tenant", optional=True),
        priority=np.nan_to_num(priority, nan=0.0),
        cpus=table.numbers("cpus", optional=True, above=0),
        memory_bytes=table.numbers("memory_bytes", optional=True, above=0),
        deadline_s=table.numbers("deadline_s", optional=True, least=0, most=MAX_SECONDS),
        gpu_models=_known_models(table),
    )


def _known_models(table: Table) -> Names:
    """Return the GPU models that each job accepts. InputError unless all are names of the catalog."""
    texts = table.texts("gpu_models", optional=True)
    for text in set(texts.tolist()) - {""}:
        try:
            for name in text.split("|"):
                find_gpu(name)
        except InputError as error:
            table.fail(int(np.flatnonzero(texts == text)[0]), "gpu_models", error.message)
    return texts
