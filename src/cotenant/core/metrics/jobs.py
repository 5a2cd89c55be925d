"""Metrics of single jobs: completion time, queueing, slowdown, finish-time fairness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cotenant.core.events import Kind
from cotenant.core.metrics.timeline import Floats, Timeline
from cotenant.core.record.record import Record


@dataclass(frozen=True)
class JobMetrics:
    """One value per job, in the order of the jobs table; NaN where a job has none (not finished, never started)."""

    finish_s: Floats  #: time of completion
    first_start_s: Floats  #: time of the first share
    rejected: NDArray[np.bool_]
    running_s: Floats  #: time holding a share; 0 for a job that never ran
    jct_s: Floats  #: job completion time: finish - arrival
    queueing_s: Floats  #: jct - running
    response_s: Floats  #: first share - arrival
    slowdown: Floats  #: jct / isolated
    ftf_rho: Floats  #: finish-time fairness, Themis (NSDI'20)
    preemptions: NDArray[np.int64]
    moves: NDArray[np.int64]
    energy_j: Floats  #: joules of the GPUs that it held


@dataclass(frozen=True)
class JobTimes:
    """What the events alone say of each job; NaN where it did not happen."""

    finish_s: Floats
    rejected_s: Floats
    first_start_s: Floats
    running_s: Floats
    preemptions: NDArray[np.int64]
    moves: NDArray[np.int64]


def job_times(timeline: Timeline) -> JobTimes:
    """The times of the timeline's jobs."""
    record, events = timeline.record, timeline.record.events
    n = record.jobs.height
    running = np.bincount(events.job, weights=timeline.length_s * timeline.holding, minlength=n)
    return JobTimes(
        finish_s=_time_of(record, Kind.FINISH),
        rejected_s=_time_of(record, Kind.REJECT),
        first_start_s=_first_share(record, timeline),
        running_s=np.asarray(running, dtype=np.float64),
        preemptions=np.bincount(events.job[events.kind == Kind.PREEMPT], minlength=n),
        moves=np.bincount(events.job[events.kind == Kind.MOVE], minlength=n),
    )


def joined_times(parts: Sequence[JobTimes]) -> JobTimes:
    """The times of the jobs of several timelines, one after the other."""
    names = JobTimes.__dataclass_fields__
    return JobTimes(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def job_metrics(record: Record, times: JobTimes, energy_j: Floats) -> JobMetrics:
    """Every per-job metric; docs/metrics.md has the formulas. `energy_j`: see metrics.energy."""
    finish = times.finish_s
    jct = finish - record.job("arrival_s")
    isolated = record.job("isolated_s")
    with np.errstate(divide="ignore", invalid="ignore"):
        slowdown = np.where(isolated > 0, jct / isolated, np.nan)
    return JobMetrics(
        finish_s=finish,
        first_start_s=times.first_start_s,
        rejected=~np.isnan(times.rejected_s),
        running_s=times.running_s,
        jct_s=jct,
        # sums of many intervals may miss the whole by rounding; time waited is never negative
        queueing_s=np.where(np.isnan(jct), np.nan, np.maximum(jct - times.running_s, 0.0)),
        response_s=np.where(np.isnan(jct), np.nan, times.first_start_s - record.job("arrival_s")),
        slowdown=slowdown,
        ftf_rho=slowdown / np.maximum(1.0, _contention(record, times)),
        preemptions=times.preemptions,
        moves=times.moves,
        energy_j=np.where(np.isnan(jct), np.nan, energy_j),
    )


def times_over(times: JobTimes) -> Floats:
    """When jobs were done or rejected, in no order."""
    both = np.concatenate((times.finish_s, times.rejected_s))
    return both[~np.isnan(both)]


def _time_of(record: Record, kind: Kind) -> Floats:
    times = np.full(record.jobs.height, np.nan)
    rows = record.events.kind == kind
    times[record.events.job[rows]] = record.events.time_s[rows]
    return times


def _first_share(record: Record, timeline: Timeline) -> Floats:
    times = np.full(record.jobs.height, np.nan)
    rows = np.flatnonzero(timeline.holding)[::-1]  # the earliest is written last and stays
    times[record.events.job[rows]] = record.events.time_s[rows]
    return times


def _contention(record: Record, times: JobTimes) -> Floats:
    """gpus x N / G: how many times the job's GPUs exceed an equal share among N unfinished jobs.

    N is the mean number of unfinished jobs, the job itself among them, from its arrival to its finish; G the GPUs of
    the cluster.
    """
    arrival = record.job("arrival_s")
    finish_s, left_s = times.finish_s, times_over(times)
    at_s = np.concatenate((arrival, left_s))
    change = np.concatenate((np.ones(len(arrival)), -np.ones(len(left_s))))
    order = np.argsort(at_s, kind="stable")
    at_s, unfinished = at_s[order], np.cumsum(change[order])
    area = np.concatenate(([0.0], np.cumsum(unfinished[:-1] * np.diff(at_s)))) if len(at_s) else np.zeros(0)
    total_gpus = float(record.info.cluster.get("gpus") or np.nan)
    known = ~np.isnan(finish_s) & (finish_s > arrival)
    mean = np.full(len(arrival), np.nan)
    lived = np.interp(finish_s[known], at_s, area) - np.interp(arrival[known], at_s, area)
    mean[known] = lived / (finish_s[known] - arrival[known])
    return np.asarray(record.job("gpus") * mean / total_gpus)
