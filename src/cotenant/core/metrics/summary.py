"""A run in one dictionary, and its jobs in groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cotenant.core.metrics import cluster
from cotenant.core.metrics.energy import Energy, energy, held_gpu_s
from cotenant.core.metrics.jobs import JobMetrics, JobTimes, job_metrics, job_times, joined_times, times_over
from cotenant.core.metrics.registry import SPREAD_METRICS
from cotenant.core.metrics.timeline import Floats, Timeline, build_timeline
from cotenant.core.record.record import Record

QUANTILES = {"median": 0.5, "p95": 0.95, "p99": 0.99, "p999": 0.999}


@dataclass(frozen=True)
class _Told:
    """What the events say, of each job and in sums: all that the figures of a run need of them."""

    times: JobTimes
    gpu_s: Floats | None  #: see energy.held_gpu_s
    held: Floats  #: see cluster.held_integrals


@dataclass
class Analysis:
    """A record with everything derived from it, each part computed once, when first asked for.

    Where the events are too many for memory they are read by jobs, a part at a time.
    """

    record: Record

    def timelines(self) -> Iterator[Timeline]:
        """The timelines of all jobs, in parts."""
        end_s = self.record.end_s
        for part in self.record.parts():
            yield self._whole if part is self.record else build_timeline(part, end_s)

    @cached_property
    def _whole(self) -> Timeline:
        return build_timeline(self.record)

    @cached_property
    def _told(self) -> _Told:
        found = [(job_times(t), held_gpu_s(t), cluster.held_integrals(t)) for t in self.timelines()]
        times, gpu_s, held = zip(*found, strict=True)
        known = [part for part in gpu_s if part is not None]
        return _Told(
            times=joined_times(times),
            gpu_s=np.concatenate(known, axis=1) if len(known) == len(gpu_s) else None,
            held=np.sum(held, axis=0),
        )

    @cached_property
    def window_s(self) -> tuple[float, float]:
        """From the first arrival to the last finish, where every job is done or rejected, else to the record's end."""
        record, times = self.record, self._told.times
        done = times.finish_s[~np.isnan(times.finish_s)]
        everything = len(done) and len(times_over(times)) >= record.jobs.height
        first_s = float(record.job("arrival_s").min()) if record.jobs.height else 0.0
        return first_s, float(done.max()) if everything else record.end_s

    @cached_property
    def jobs(self) -> JobMetrics:
        return job_metrics(self.record, self._told.times, self.energy.jobs_j)

    @cached_property
    def energy(self) -> Energy:
        return energy(self.record, self._told.gpu_s, self.window_s[1] - self.window_s[0])

    def shares(self, *, useful: bool) -> dict[str, float]:
        """Share of the cluster's GPUs, cores and memory that jobs held, 0..1, from the first arrival to the end.

        `useful`: of each job's cores and memory only what it can put to use.
        """
        return cluster.shares(self.record, self._told.held[int(useful)], self.window_s[1] - self.window_s[0])

    @cached_property
    def measured(self) -> NDArray[np.bool_]:
        """Per job, whether the figures of single jobs cover it: those from..to of option `measure`, else all."""
        rows = np.arange(self.record.jobs.height)
        first, last = self.record.info.options.get("measure") or (0, len(rows))
        return np.asarray((rows >= first) & (rows < last))

    def values(self, key: str) -> Floats:
        """A per-job metric ("jct_s", ...); NaN where a job has none or is not measured."""
        return np.asarray(np.where(self.measured, getattr(self.jobs, key), np.nan))

    @cached_property
    def summary(self) -> dict[str, Any]:
        return _summary(self)

    def series(self, bins: int = 240) -> cluster.Series:
        """The cluster over time."""
        return cluster.series(self.record, self.timelines(), self._told.times, self.window_s, bins)


def summarise(record: Record) -> dict[str, Any]:
    """What came out of a run, as plain data for JSON; a value that does not exist is None.

    Keys are those of METRICS, one level for each dot. SPREAD_METRICS have mean, median, p95, p99, p999 over completed
    jobs; moves is None where the record leaves placements out.
    """
    return Analysis(record).summary


def spread(values: Floats) -> dict[str, float | None]:
    """Mean and percentiles (linear between ranks) of the values that are not NaN; all None where there is none."""
    known = values[~np.isnan(values)]
    if len(known) == 0:
        return dict.fromkeys(("mean", *QUANTILES))
    at = np.quantile(known, list(QUANTILES.values()), method="linear")
    return {"mean": float(known.mean()), **{name: float(x) for name, x in zip(QUANTILES, at, strict=True)}}


def _summary(analysis: Analysis) -> dict[str, Any]:
    record, jobs = analysis.record, analysis.jobs
    done = ~np.isnan(jobs.finish_s)
    deadline = record.job("deadline_s")
    stated = ~np.isnan(deadline) & analysis.measured
    return {
        "jobs": record.jobs.height,
        "jobs_completed": int(done.sum()),
        "jobs_rejected": int(jobs.rejected.sum()),
        "jobs_unfinished": int((~done & ~jobs.rejected).sum()),
        **{key: spread(analysis.values(key)) for key in SPREAD_METRICS},
        "makespan_s": float(jobs.finish_s[done].max()) if done.any() else None,
        "energy": _energy(analysis.energy),
        "utilisation": _plain(analysis.shares(useful=True)),
        "allocation": _plain(analysis.shares(useful=False)),
        "fragmentation": _number(cluster.fragmentation(record, analysis.window_s)),
        "preemptions": int(jobs.preemptions.sum()),
        "moves": int(jobs.moves.sum()) if record.info.placements else None,
        "rounds": record.rounds.height,
        "deadlines_met": float((jobs.finish_s <= deadline)[stated].mean()) if stated.any() else None,
    }


def _energy(used: Energy) -> dict[str, float | None]:
    jobs_j = float(used.jobs_j.sum())
    return _plain({"jobs_j": jobs_j, "idle_j": used.idle_j, "total_j": jobs_j + used.idle_j})


def breakdown(analysis: Analysis, groups: NDArray[Any]) -> list[dict[str, Any]]:
    """Completed (and measured) jobs by group, in the order of the groups' names.

    `groups`: one value per job (text or number). Each entry: group, jobs, SPREAD_METRICS.
    """
    jobs = analysis.jobs
    done = ~np.isnan(jobs.finish_s) & analysis.measured
    names, which = np.unique(groups[done], return_inverse=True)
    order = np.argsort(which, kind="stable")
    ends = np.searchsorted(which[order], np.arange(len(names) + 1))
    rows = np.flatnonzero(done)[order]
    entries = []
    for i, name in enumerate(names.tolist()):
        mine = rows[ends[i] : ends[i + 1]]
        values = {key: spread(getattr(jobs, key)[mine]) for key in SPREAD_METRICS}
        entries.append({"group": name, "jobs": len(mine), **values})
    return entries


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _plain(values: dict[str, float]) -> dict[str, float | None]:
    return {name: _number(value) for name, value in values.items()}
