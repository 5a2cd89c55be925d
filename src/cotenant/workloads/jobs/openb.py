"""Reads the trace of Alibaba's GPU-sharing cluster of 2023 (openb): pods with cpu_milli, memory_mib, num_gpu,
gpu_milli, gpu_spec, qos, pod_phase and creation, deletion and scheduling times in seconds.

A pod with one GPU requests gpu_milli thousandths of that GPU; a pod with several GPUs requests each as a whole. A pod
runs from scheduled_time to deletion_time, whatever its last phase. The quality-of-service class is used as the tenant.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from cotenant.core.errors import InputError
from cotenant.core.gpus import find_gpu
from cotenant.core.units import counted
from cotenant.core.work import Floats, Names, Trace
from cotenant.workloads.table import MAX_SECONDS, Table
from cotenant.workloads.table_files import read_csv
from cotenant.workloads.trace_options import TraceOptions

TIMES = ("creation_time", "deletion_time", "scheduled_time")
COLUMNS = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "gpu_spec", "qos", "pod_phase", *TIMES)
MIB = 2**20


def read(path: str, options: TraceOptions) -> Trace:
    """Read the pods as jobs. Pods that have no GPUs, were never scheduled, or still run are left out.

    A list without times (multigpu20) can be read only if options replace both arrivals and durations.
    """
    table = read_csv(path, COLUMNS)
    table.require("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
    table.leave_out(table.gpu_counts("num_gpu") == 0, "with 0 GPUs")
    timed = any(name in table.columns for name in TIMES)
    if timed:
        table.require(*TIMES)
        _leave_out_unfinished(table)
        arrival_s = table.numbers("creation_time", least=0, most=MAX_SECONDS)
        duration_s = _durations(table)
    elif options.arrivals and options.durations:
        arrival_s, duration_s = np.zeros(len(table)), np.full(len(table), np.nan)
    else:
        raise InputError(
            "the file has no times; draw them with --arrivals and --durations, such as "
            "--arrivals poisson --rate 100/h --durations two-part",
            file=path,
            field="creation_time",
        )
    trace = table.trace(
        f"openb:{path}",
        id=table.texts("name"),
        arrival_s=arrival_s,
        gpus=_gpus(table),
        duration_s=duration_s,
        tenant=table.texts("qos", optional=True),
        cpus=_nothing_is_unstated(table.numbers("cpu_milli", least=0)) / 1000,
        memory_bytes=_nothing_is_unstated(table.numbers("memory_mib", least=0)) * MIB,
        gpu_models=_models(table),
    )
    if not timed:
        drawn = f"the arrivals and durations of {counted(len(trace.jobs), 'job')} are drawn"
        trace.remarks = [f"the file has no times: {drawn}"]
    return trace


def _nothing_is_unstated(values: Floats) -> Floats:
    return np.where(values > 0, values, np.nan)


def _leave_out_unfinished(table: Table) -> None:
    if "pod_phase" in table.columns:
        pending = (table.texts("pod_phase", optional=True) == "Pending") & table.empty("scheduled_time")
        table.leave_out(pending, "never scheduled (Pending)")
    table.leave_out(table.empty("scheduled_time"), "without scheduled_time")
    table.leave_out(table.empty("deletion_time"), "without deletion_time")
    table.leave_out(_durations(table) == 0, "without duration")


def _durations(table: Table) -> Floats:
    start = table.numbers("scheduled_time", least=0, most=MAX_SECONDS)
    end = table.numbers("deletion_time", least=0, most=MAX_SECONDS)
    table.refuse(end < start, "deletion_time", "{} is before scheduled_time; the duration is negative")
    return end - start


def _gpus(table: Table) -> Floats:
    count = table.gpu_counts("num_gpu")
    milli = table.numbers("gpu_milli", above=0, most=1000)
    partial = milli < 1000
    table.refuse(partial & (count != 1), "gpu_milli", "{} of 1000; only a pod on one GPU can ask for a part of it")
    gpus: Floats = np.where(partial, milli / 1000, count)
    return gpus


def _models(table: Table) -> Names:
    """Return gpu_spec, the GPU models that each pod accepts, with names of the catalog and without duplicates:
    V100M16|V100M32|V100M32 -> V100-16GB|V100-32GB.
    """
    written = table.texts("gpu_spec", optional=True)
    known: dict[str, str] = {}
    for row, spec in enumerate(written.tolist() if len(written) else []):
        if spec not in known:
            try:
                names = [find_gpu(name).name for name in spec.split("|") if name.strip()]
            except InputError as error:
                table.fail(row, "gpu_spec", error.message)
            known[spec] = "|".join(dict.fromkeys(names))
    models = pl.Series(written.tolist(), dtype=pl.String).replace(known)
    return np.array(models.to_list(), dtype=object).reshape(len(written))
