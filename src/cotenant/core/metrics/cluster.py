"""Metrics of the cluster: utilisation, allocation, fragmentation, and everything over time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cotenant.core.metrics.jobs import JobTimes
from cotenant.core.metrics.timeline import Floats, Resource, Timeline, mean_in_bins
from cotenant.core.record.record import Record

RESOURCES: tuple[Resource, ...] = ("gpu", "cpu", "memory")
HELD: tuple[tuple[Resource, bool], ...] = (  # of use or not
    ("gpu", False), ("cpu", False), ("memory", False), ("cpu", True), ("memory", True),
)  # fmt: skip


def held_integrals(timeline: Timeline) -> Floats:
    """GPU-, core- and byte-seconds that the timeline's jobs held, and those of use: [2, 3]."""
    return np.array(
        [[timeline.integral(timeline.held(name, useful)) for name in RESOURCES] for useful in (False, True)]
    )


def shares(record: Record, held: Floats, span_s: float) -> dict[str, float]:
    """What was held, as `held_integrals` gives it, over the cluster's GPUs, cores and memory times the span: 0..1."""
    return {
        name: float(amount) / (total * span_s) if span_s > 0 else float("nan")
        for name, amount, total in zip(RESOURCES, held, capacities(record), strict=True)
    }


def capacities(record: Record) -> tuple[float, float, float]:
    """The cluster's GPUs, cores and memory in bytes; NaN where the record does not say."""
    cluster = record.info.cluster
    gpus, cpus, memory = (float(cluster.get(key) or np.nan) for key in ("gpus", "cpus", "memory_bytes"))
    return gpus, cpus, memory


def stranded_gpus(record: Record) -> Floats:
    """After each round: free GPUs on partly used nodes while jobs wait, the part that a gang cannot have whole."""
    rounds = {name: record.rounds[name].to_numpy() for name in ("gpus_held", "gpus_free_whole_nodes", "waiting")}
    free = capacities(record)[0] - rounds["gpus_held"]
    stranded = np.maximum(free - rounds["gpus_free_whole_nodes"], 0.0)
    return np.asarray(np.where(rounds["waiting"] > 0, stranded, 0.0))


def fragmentation(record: Record, window_s: tuple[float, float]) -> float:
    """Time-weighted mean share of the cluster's GPUs that are stranded, 0..1; NaN where the record has no rounds."""
    times = record.rounds["time_s"].to_numpy()
    if len(times) == 0 or window_s[1] <= window_s[0]:
        return float("nan")
    change = np.diff(stranded_gpus(record), prepend=0.0)
    return float(mean_in_bins(times, change, np.array(window_s))[0] / capacities(record)[0])


@dataclass(frozen=True)
class Series:
    """Time-weighted means in equal bins from the first arrival to the end; arrays of length bins."""

    edges_s: Floats  #: length bins + 1
    running: Floats  #: jobs
    waiting: Floats  #: jobs
    gpu: Floats  #: share of the cluster held, 0..1
    cpu: Floats
    memory: Floats
    useful_cpu: Floats  #: share of the cluster held and of use, 0..1
    useful_memory: Floats
    wanted: Floats  #: GPUs wanted by running and waiting jobs against the cluster's; above 1 when overloaded
    stranded: Floats  #: share of the cluster's GPUs that are stranded, 0..1


def series(
    record: Record, timelines: Iterable[Timeline], times: JobTimes, window_s: tuple[float, float], bins: int
) -> Series:
    """The cluster over time, from the timelines of all its jobs."""
    first_s, end_s = window_s
    edges = np.linspace(first_s, max(end_s, first_s + 1e-9), bins + 1)
    held = sum((_held_over_time(timeline, edges) for timeline in timelines), np.zeros((6, bins)))
    gpus, cpus, memory = capacities(record)
    present, wanted = _present(record, times, edges)
    rounds_s = record.rounds["time_s"].to_numpy()
    return Series(
        edges_s=edges,
        running=held[0],
        waiting=np.maximum(present - held[0], 0.0),
        gpu=held[1] / gpus,
        cpu=held[2] / cpus,
        memory=held[3] / memory,
        useful_cpu=held[4] / cpus,
        useful_memory=held[5] / memory,
        wanted=wanted / gpus,
        stranded=mean_in_bins(rounds_s, np.diff(stranded_gpus(record), prepend=0.0), edges) / gpus,
    )


def _held_over_time(timeline: Timeline, edges_s: Floats) -> Floats:
    """Jobs that run, GPUs, cores and bytes that they hold, and cores and bytes of use, in each bin: [6, bins]."""
    amounts = [timeline.held(what, useful) for what, useful in HELD]
    return np.stack([
        mean_in_bins(timeline.record.events.time_s, timeline.change(amount), edges_s)
        for amount in (timeline.holding.astype(np.float64), *amounts)
    ])  # fmt: skip


def _present(record: Record, times: JobTimes, edges_s: Floats) -> tuple[Floats, Floats]:
    """Jobs that arrived and are not over, and the GPUs they want, in each bin."""
    gpus = record.job("gpus")
    over_s = np.concatenate((times.finish_s, times.rejected_s))
    over = ~np.isnan(over_s)
    at_s = np.concatenate((record.job("arrival_s"), over_s[over]))
    sign = np.concatenate((np.ones(len(gpus)), -np.ones(int(over.sum()))))
    wants = np.concatenate((gpus, np.concatenate((gpus, gpus))[over]))
    order = np.argsort(at_s, kind="stable")
    at_s, sign, wants = at_s[order], sign[order], wants[order]
    return mean_in_bins(at_s, sign, edges_s), mean_in_bins(at_s, sign * wants, edges_s)
