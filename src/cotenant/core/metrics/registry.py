"""The registry of metrics: name, unit, label and direction. docs/metrics.md has the formulas; a test checks that the
page and this registry list the same metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Better = Literal["lower", "higher", "neither"]


@dataclass(frozen=True)
class Metric:
    """One metric of a run. `key` is the metric's path in the summary, with dots between levels."""

    key: str
    label: str
    unit: str  #: unit of the metric: s | share | count | ratio | J
    better: Better


_SPREADS = (
    Metric("jct_s", "Job completion time", "s", "lower"),
    Metric("queueing_s", "Queueing delay", "s", "lower"),
    Metric("response_s", "Response time", "s", "lower"),
    Metric("slowdown", "Slowdown", "ratio", "lower"),
    Metric("ftf_rho", "Finish-time fairness ρ", "ratio", "lower"),
    Metric("energy_j", "Energy of a job", "J", "lower"),
)
SPREAD_METRICS: tuple[str, ...] = tuple(metric.key for metric in _SPREADS)

METRICS: dict[str, Metric] = {
    metric.key: metric
    for metric in (
        Metric("jobs", "Jobs", "count", "neither"),
        Metric("jobs_completed", "Jobs completed", "count", "higher"),
        Metric("jobs_rejected", "Jobs rejected", "count", "lower"),
        Metric("jobs_unfinished", "Jobs unfinished", "count", "lower"),
        *_SPREADS,
        Metric("makespan_s", "Makespan", "s", "lower"),
        Metric("utilisation.gpu", "GPU utilisation", "share", "higher"),
        Metric("utilisation.cpu", "CPU utilisation", "share", "higher"),
        Metric("utilisation.memory", "Memory utilisation", "share", "higher"),
        Metric("allocation.gpu", "GPU allocation", "share", "neither"),
        Metric("allocation.cpu", "CPU allocation", "share", "neither"),
        Metric("allocation.memory", "Memory allocation", "share", "neither"),
        Metric("fragmentation", "Fragmentation", "share", "lower"),
        Metric("energy.jobs_j", "Energy of GPUs held by jobs", "J", "lower"),
        Metric("energy.idle_j", "Energy of idle GPUs", "J", "lower"),
        Metric("energy.total_j", "Energy of all GPUs", "J", "lower"),
        Metric("preemptions", "Preemptions", "count", "lower"),
        Metric("moves", "Moves", "count", "lower"),
        Metric("rounds", "Rounds", "count", "neither"),
        Metric("deadlines_met", "Deadlines met", "share", "higher"),
    )
}


def lookup(summary: dict[str, object], key: str) -> float | None:
    """Return the value at a dotted key ("jct_s.mean", "utilisation.gpu") of a summary; None if there is none."""
    value: object = summary
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) else None
