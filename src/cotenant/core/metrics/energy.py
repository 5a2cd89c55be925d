"""Energy of each job's GPUs and of idle GPUs, computed from a record and the table of watts (core/power.py)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from cotenant.core.metrics.timeline import Floats, Timeline
from cotenant.core.power import activity, watts
from cotenant.core.record.record import Record


@dataclass(frozen=True)
class Energy:
    """`jobs_j`: for each job, the joules of the GPUs that it held, including their idle power; `idle_j`: joules of GPUs
    that no job held, from the first arrival to the end.
    """

    jobs_j: Floats
    idle_j: float


def energy(record: Record, timeline: Timeline) -> Energy:
    """Return the energy of a run's GPUs in joules; NaN if the watts of a GPU are unknown, or if GPU models are mixed
    and the record has no placements.

    A job on n GPUs draws n x (idle + (max - idle) x activity). `idle` and `max` are watts of the GPU model, `activity`
    belongs to the model that the job trains (core/power.py has both tables).
    """
    n = record.jobs.height
    unknown = Energy(np.full(n, np.nan), float("nan"))
    models = record.info.cluster.get("gpu_models") or []
    known = [watts(str(name)) for name in models]
    if not known or any(entry is None for entry in known):
        return unknown
    idle_w, most_w = (np.array([entry[i] for entry in known if entry is not None]) for i in range(2))
    names = record.jobs["model"].unique().to_list()
    busy = record.jobs["model"].replace_strict(names, [activity(x) for x in names], return_dtype=pl.Float64).to_numpy()
    held = _held_by_model(record, timeline, len(known))
    if held is None:
        return unknown
    total = np.array(record.info.cluster.get("gpus_by_model") or [record.info.cluster["gpus"]], np.float64)
    jobs_j, busy_s = np.zeros(n), np.zeros(len(known))
    for model, gpus in enumerate(held):
        gpu_s = gpus * timeline.length_s
        watts_of = idle_w[model] + (most_w[model] - idle_w[model]) * busy
        jobs_j += np.bincount(record.events.job, weights=gpu_s, minlength=n) * watts_of
        busy_s[model] = float(gpu_s.sum())
    span_s = timeline.end_s - timeline.first_s
    return Energy(jobs_j, float((np.maximum(total * span_s - busy_s, 0.0) * idle_w).sum()))


def _held_by_model(record: Record, timeline: Timeline, models: int) -> list[Floats] | None:
    """Return one array for each GPU model: the number of GPUs of that model that an event's job holds after the event.
    None if GPU models are mixed and the record has no placements.
    """
    if models == 1:
        return [timeline.held("gpu")]
    where, node_models = record.placements, record.info.cluster.get("node_models")
    if where is None or not node_models:
        return None
    event = np.repeat(np.arange(len(record.events)), np.diff(where.offset))
    model = np.asarray(node_models)[where.nodes]
    return [
        np.asarray(
            timeline.holding
            * np.bincount(event[model == m], weights=where.gpus[model == m], minlength=len(record.events)),
            np.float64,
        )
        for m in range(models)
    ]
