"""Metrics of the cluster: utilisation, allocation, fragmentation, and time series."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cotenant.core.events import Kind
from cotenant.core.metrics.timeline import Floats, Resource, Timeline, mean_in_bins
from cotenant.core.record.record import Record

RESOURCES: tuple[Resource, ...] = ("gpu", "cpu", "memory")


def allocation(record: Record, timeline: Timeline) -> dict[str, float]:
    """Return the share of the cluster's GPUs, cores and memory that jobs held, 0..1, from the first arrival to the end.
    """
    return _shares(record, timeline, useful=False)


def utilisation(record: Record, timeline: Timeline) -> dict[str, float]:
    """Return shares like `allocation`, but cores and memory that a job cannot use do not count."""
    return _shares(record, timeline, useful=True)


def _shares(record: Record, timeline: Timeline, useful: bool) -> dict[str, float]:
    span = timeline.end_s - timeline.first_s
    shares: dict[str, float] = {}
    for name, total in zip(RESOURCES, capacities(record), strict=True):
        held = timeline.integral(timeline.held(name, useful))
        shares[name] = held / (total * span) if span > 0 else float("nan")
    return shares


def capacities(record: Record) -> tuple[float, float, float]:
    """Return the cluster's GPUs, cores and memory in bytes; NaN if the record does not contain them."""
    cluster = record.info.cluster
    gpus, cpus, memory = (float(cluster.get(key) or np.nan) for key in ("gpus", "cpus", "memory_bytes"))
    return gpus, cpus, memory


def stranded_gpus(record: Record) -> Floats:
    """Return the number of stranded GPUs after each round: free GPUs on partly used nodes while jobs wait. A job that
    needs whole nodes cannot use them.
    """
    rounds = {name: record.rounds[name].to_numpy() for name in ("gpus_held", "gpus_free_whole_nodes", "waiting")}
    free = capacities(record)[0] - rounds["gpus_held"]
    stranded = np.maximum(free - rounds["gpus_free_whole_nodes"], 0.0)
    return np.asarray(np.where(rounds["waiting"] > 0, stranded, 0.0))


def fragmentation(record: Record, timeline: Timeline) -> float:
    """Return the time-weighted mean fraction of the cluster's GPUs that are stranded, 0..1; NaN if the record has no
    rounds.
    """
    times = record.rounds["time_s"].to_numpy()
    if len(times) == 0 or timeline.end_s <= timeline.first_s:
        return float("nan")
    change = np.diff(stranded_gpus(record), prepend=0.0)
    window = np.array([timeline.first_s, timeline.end_s])
    return float(mean_in_bins(times, change, window)[0] / capacities(record)[0])


@dataclass(frozen=True)
class Series:
    """Time series of the cluster. The time from the first arrival to the end is divided into equal bins; each array has
    one time-weighted mean per bin.
    """

    edges_s: Floats  #: times at which the bins begin, and the end of the last one
    running: Floats  #: jobs
    waiting: Floats  #: jobs
    gpu: Floats  #: share of the cluster's GPUs that jobs hold, 0..1
    cpu: Floats
    memory: Floats
    useful_cpu: Floats  #: share of the cluster's cores that are held by jobs that can use them, 0..1
    useful_memory: Floats
    wanted: Floats  #: GPUs wanted by running and waiting jobs, divided by the cluster's GPUs; above 1 in overload
    stranded: Floats  #: share of the cluster's GPUs that are free but stranded, 0..1


def series(record: Record, timeline: Timeline, bins: int = 240) -> Series:
    """Compute the time series of the cluster from a run's record."""
    edges = np.linspace(timeline.first_s, max(timeline.end_s, timeline.first_s + 1e-9), bins + 1)

    def over_time(held: Floats) -> Floats:
        return mean_in_bins(record.events.time_s, timeline.change(held), edges)

    gpus, cpus, memory = capacities(record)
    running = over_time(timeline.holding.astype(np.float64))
    present, wanted = _present(record, edges)
    rounds_s = record.rounds["time_s"].to_numpy()
    return Series(
        edges_s=edges,
        running=running,
        waiting=np.maximum(present - running, 0.0),
        gpu=over_time(timeline.held("gpu")) / gpus,
        cpu=over_time(timeline.held("cpu")) / cpus,
        memory=over_time(timeline.held("memory")) / memory,
        useful_cpu=over_time(timeline.held("cpu", useful=True)) / cpus,
        useful_memory=over_time(timeline.held("memory", useful=True)) / memory,
        wanted=wanted / gpus,
        stranded=mean_in_bins(rounds_s, np.diff(stranded_gpus(record), prepend=0.0), edges) / gpus,
    )


def _present(record: Record, edges_s: Floats) -> tuple[Floats, Floats]:
    """Return the number of unfinished jobs that have arrived, and the GPUs that these jobs want, in each bin."""
    events, gpus = record.events, record.job("gpus")
    over = (events.kind == Kind.FINISH) | (events.kind == Kind.REJECT)
    times = np.concatenate((record.job("arrival_s"), events.time_s[over]))
    sign = np.concatenate((np.ones(record.jobs.height), -np.ones(int(over.sum()))))
    wants = np.concatenate((gpus, gpus[events.job[over]]))
    order = np.argsort(times, kind="stable")
    times, sign, wants = times[order], sign[order], wants[order]
    return mean_in_bins(times, sign, edges_s), mean_in_bins(times, sign * wants, edges_s)
