"""The summary of a run as one dictionary, also by groups of jobs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cotenant.core.metrics import cluster
from cotenant.core.metrics.energy import Energy, energy
from cotenant.core.metrics.jobs import JobMetrics, job_metrics
from cotenant.core.metrics.registry import SPREAD_METRICS
from cotenant.core.metrics.timeline import Floats, Timeline, build_timeline
from cotenant.core.record.record import Record

QUANTILES = {"median": 0.5, "p95": 0.95, "p99": 0.99, "p999": 0.999}


@dataclass
class Analysis:
    """A record and the values derived from it, each computed once on first use."""

    record: Record

    @cached_property
    def timeline(self) -> Timeline:
        return build_timeline(self.record)

    @cached_property
    def jobs(self) -> JobMetrics:
        return job_metrics(self.record, self.timeline, self.energy.jobs_j)

    @cached_property
    def energy(self) -> Energy:
        return energy(self.record, self.timeline)

    @cached_property
    def measured(self) -> NDArray[np.bool_]:
        """Return for each job whether figures of single jobs include it: the jobs in the range of the option `measure`,
        or all jobs without that option.
        """
        rows = np.arange(self.record.jobs.height)
        first, last = self.record.info.options.get("measure") or (0, len(rows))
        return np.asarray((rows >= first) & (rows < last))

    def values(self, key: str) -> Floats:
        """Return a metric of single jobs ("jct_s", ...), by job; NaN if a job has no value or is not measured."""
        return np.asarray(np.where(self.measured, getattr(self.jobs, key), np.nan))

    @cached_property
    def summary(self) -> dict[str, Any]:
        return _summary(self)

    def series(self, bins: int = 240) -> cluster.Series:
        """Return the time series of the cluster in `bins` equal bins."""
        return cluster.series(self.record, self.timeline, bins)


def summarise(record: Record) -> dict[str, Any]:
    """Return the figures of a run as plain data for JSON; undefined values are None.

    Keys are those of METRICS, one level per dot. SPREAD_METRICS have mean, median, p95, p99, p999 over completed jobs;
    moves is None if the record has no placements.
    """
    return Analysis(record).summary


def spread(values: Floats) -> dict[str, float | None]:
    """Return mean and percentiles (linear interpolation) of the values that are not NaN; all None if there are none."""
    known = values[~np.isnan(values)]
    if len(known) == 0:
        return dict.fromkeys(("mean", *QUANTILES))
    at = np.quantile(known, list(QUANTILES.values()), method="linear")
    return {"mean": float(known.mean()), **{name: float(x) for name, x in zip(QUANTILES, at, strict=True)}}


def _summary(analysis: Analysis) -> dict[str, Any]:
    record, timeline, jobs = analysis.record, analysis.timeline, analysis.jobs
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
        "utilisation": _plain(cluster.utilisation(record, timeline)),
        "allocation": _plain(cluster.allocation(record, timeline)),
        "fragmentation": _number(cluster.fragmentation(record, timeline)),
        "preemptions": int(jobs.preemptions.sum()),
        "moves": int(jobs.moves.sum()) if record.info.placements else None,
        "rounds": record.rounds.height,
        "deadlines_met": float((jobs.finish_s <= deadline)[stated].mean()) if stated.any() else None,
    }


def _energy(used: Energy) -> dict[str, float | None]:
    jobs_j = float(used.jobs_j.sum())
    return _plain({"jobs_j": jobs_j, "idle_j": used.idle_j, "total_j": jobs_j + used.idle_j})


def breakdown(analysis: Analysis, groups: NDArray[Any]) -> list[dict[str, Any]]:
    """Return metrics of completed and measured jobs by group, sorted by group name.

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
