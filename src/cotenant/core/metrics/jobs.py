"""Metrics of single jobs: completion time, queueing, slowdown, finish-time fairness."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cotenant.core.events import Kind
from cotenant.core.metrics.timeline import Floats, Timeline
from cotenant.core.record.record import Record


@dataclass(frozen=True)
class JobMetrics:
    """Metrics of single jobs: one value per job, in the order of the jobs table; NaN if undefined (not finished, never
    started).
    """

    finish_s: Floats  #: time at which the job was finished
    first_start_s: Floats  #: time at which the job first got GPUs
    rejected: NDArray[np.bool_]
    running_s: Floats  #: seconds for which the job held GPUs; 0 for a job that never ran
    jct_s: Floats  #: job completion time: finish - arrival
    queueing_s: Floats  #: jct - running
    response_s: Floats  #: time from the job's arrival until it first got GPUs
    slowdown: Floats  #: jct / isolated
    #: finish-time fairness rho of Themis (NSDI'20): completion time divided by the time that the job would take with an
    #: equal share of the cluster
    ftf_rho: Floats
    preemptions: NDArray[np.int64]
    moves: NDArray[np.int64]
    energy_j: Floats  #: joules of the GPUs held by the job


def job_metrics(record: Record, timeline: Timeline, energy_j: Floats) -> JobMetrics:
    """Compute every metric of single jobs; docs/metrics.md has the formulas. `energy_j`: see metrics.energy."""
    events, n = record.events, record.jobs.height
    finish = _time_of(record, Kind.FINISH)
    rejected = ~np.isnan(_time_of(record, Kind.REJECT))
    running: Floats = np.asarray(
        np.bincount(events.job, weights=timeline.length_s * timeline.holding, minlength=n), dtype=np.float64
    )
    jct = finish - record.job("arrival_s")
    isolated = record.job("isolated_s")
    with np.errstate(divide="ignore", invalid="ignore"):
        slowdown = np.where(isolated > 0, jct / isolated, np.nan)
    first_start = _first_share(record, timeline)
    return JobMetrics(
        finish_s=finish,
        first_start_s=first_start,
        rejected=rejected,
        running_s=running,
        jct_s=jct,
        # rounding errors in a sum of many intervals can make the difference slightly negative
        queueing_s=np.where(np.isnan(jct), np.nan, np.maximum(jct - running, 0.0)),
        response_s=np.where(np.isnan(jct), np.nan, first_start - record.job("arrival_s")),
        slowdown=slowdown,
        ftf_rho=slowdown / np.maximum(1.0, _contention(record, timeline, finish)),
        preemptions=np.bincount(events.job[events.kind == Kind.PREEMPT], minlength=n),
        moves=np.bincount(events.job[events.kind == Kind.MOVE], minlength=n),
        energy_j=np.where(np.isnan(jct), np.nan, energy_j),
    )


def _time_of(record: Record, kind: Kind) -> Floats:
    times = np.full(record.jobs.height, np.nan)
    rows = record.events.kind == kind
    times[record.events.job[rows]] = record.events.time_s[rows]
    return times


def _first_share(record: Record, timeline: Timeline) -> Floats:
    times = np.full(record.jobs.height, np.nan)
    # the array is written in reverse order, so that the earliest event of a job is written last and stays
    rows = np.flatnonzero(timeline.holding)[::-1]
    times[record.events.job[rows]] = record.events.time_s[rows]
    return times


def _contention(record: Record, timeline: Timeline, finish_s: Floats) -> Floats:
    """Return for each job its number of GPUs relative to an equal share of the cluster's G GPUs among N jobs:
    gpus x N / G.

    N is the mean number of unfinished jobs, including this one, from its arrival to its finish.
    """
    arrival = record.job("arrival_s")
    over = record.events.kind
    left_s = record.events.time_s[(over == Kind.FINISH) | (over == Kind.REJECT)]
    times = np.concatenate((arrival, left_s))
    change = np.concatenate((np.ones(len(arrival)), -np.ones(len(left_s))))
    order = np.argsort(times, kind="stable")
    times, unfinished = times[order], np.cumsum(change[order])
    area = np.concatenate(([0.0], np.cumsum(unfinished[:-1] * np.diff(times)))) if len(times) else np.zeros(0)
    total_gpus = float(record.info.cluster.get("gpus") or np.nan)
    known = ~np.isnan(finish_s) & (finish_s > arrival)
    mean = np.full(len(arrival), np.nan)
    lived = np.interp(finish_s[known], times, area) - np.interp(arrival[known], times, area)
    mean[known] = lived / (finish_s[known] - arrival[known])
    return np.asarray(record.job("gpus") * mean / total_gpus)
