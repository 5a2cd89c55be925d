"""Reads Alibaba's traces of 2026 of image generation with diffusion models, LoRA adapters and ControlNets (GenTD26).
Two layouts:

    requests    gmt_create (local, no zone), predict_type, predict_status, exec_time_seconds, groupId,
                checkpoint_model_version_id, num_lora, ...; the older data_trace_processed.csv has no gmt_create
    latencies   timestamp_anon [s], value [ms], container_ip: samples of the time for an inference, or for loading a
                base model, a LoRA adapter, a ControlNet or a whole pipeline

Other files of the trace have the same columns as latencies, so only the name of the file shows what its values are.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cotenant.core.errors import InputError
from cotenant.core.units import counted
from cotenant.core.work import Names, Trace
from cotenant.workloads.jobs.clock import clock_seconds
from cotenant.workloads.jobs.cluster_log import remark_counts
from cotenant.workloads.table import MAX_SECONDS, Table
from cotenant.workloads.table_files import read_csv
from cotenant.workloads.trace_options import TraceOptions

SERIES = ("timestamp_anon", "value", "container_ip")
REQUESTS = ("gmt_create", "predict_type", "predict_status", "exec_time_seconds", "groupId",
            "checkpoint_model_version_id", "num_lora")  # fmt: skip
# in files whose names contain one of these texts, `value` is a time in milliseconds
LATENCIES = ("latency", "model_predict", "pipeline_inference")
NOT_FINISHED = ("PENDING", "PROCESSING")


def read(path: str, options: TraceOptions) -> Trace:
    """Read requests, or samples of a latency, as jobs on one GPU."""
    table = read_csv(path, (*SERIES, *REQUESTS))
    if "timestamp_anon" in table.columns:
        return _latencies(path, table)
    table.require("exec_time_seconds", "predict_type")
    if "gmt_create" not in table.columns and not options.arrivals:
        raise InputError(
            "the file has no arrival times; draw them with --arrivals, such as --arrivals poisson --rate 100/h",
            file=path,
            field="gmt_create",
        )
    return _requests(path, table)


def _requests(path: str, table: Table) -> Trace:
    """Read requests, failed ones included. The group that sent a request is used as the tenant, and the request's base
    model as the model.
    """
    status = table.texts("predict_status", optional=True)
    table.leave_out(np.isin(status.astype(str), NOT_FINISHED), "not finished (PENDING or PROCESSING)")
    table.leave_out(table.numbers("exec_time_seconds", least=0, most=MAX_SECONDS) == 0, "without duration")
    arrival_s = clock_seconds(table, "gmt_create") if "gmt_create" in table.columns else np.zeros(len(table))
    adapted = int((table.numbers("num_lora", optional=True) > 0).sum())
    if adapted:
        table.remarks.append(f"{counted(adapted, 'request uses', 'requests use')} LoRA adapters")
    remark_counts(table, "predict_status")
    remark_counts(table, "predict_type")
    return table.trace(
        f"alibaba-genai:{path}",
        id=_rows(table),
        arrival_s=arrival_s - arrival_s.min() if len(table) else arrival_s,
        gpus=np.ones(len(table)),
        duration_s=table.numbers("exec_time_seconds"),
        tenant=table.texts("groupId", optional=True),
        model=table.texts("checkpoint_model_version_id", optional=True),
    )


def _latencies(path: str, table: Table) -> Trace:
    name = Path(path).name
    if not any(part in name for part in LATENCIES):
        raise InputError(
            f"{name} is not a series of GPU work in milliseconds: of this trace's series only files named "
            f"{', '.join(f'*{part}*' for part in LATENCIES)} can be read",
            file=path,
        )
    table.require(*SERIES)
    table.leave_out(table.numbers("value", least=0, most=MAX_SECONDS * 1000) == 0, "without duration")
    table.remarks.append(
        "rows are samples that containers reported, so there are not as many rows as loads of models or inferences"
    )
    arrival_s = table.numbers("timestamp_anon", least=0, most=MAX_SECONDS)
    container = table.texts("container_ip", optional=True)
    return table.trace(
        f"alibaba-genai:{path}",
        id=_rows(table),
        arrival_s=arrival_s - arrival_s.min() if len(table) else arrival_s,
        gpus=np.ones(len(table)),
        duration_s=table.numbers("value") / 1000,
        tenant=np.where(np.isin(container.astype(str), ("NULL", "None")), "", container).astype(object),
    )


def _rows(table: Table) -> Names:
    return np.array([str(row) for row in table.rows.tolist()], dtype=object)
