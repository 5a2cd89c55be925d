"""Statistics of a job trace, for `cotenant trace inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cotenant.core.units import format_seconds
from cotenant.core.work import Floats, Trace
from cotenant.workloads.jobs.select import durations_of

QUANTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


def summarise(trace: Trace, iteration_s: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return statistics of a job trace as plain data: kept and left-out rows, span, GPU counts, durations, interarrival
    times, models and tenants.

    `iteration_s` (model -> seconds per iteration) gives durations of jobs that state only iterations.
    `duration_s.unknown` counts jobs without a duration; if all are, `gpu_hours` is None.
    """
    jobs = trace.jobs
    durations = durations_of(jobs, iteration_s)
    known = ~np.isnan(durations)
    gaps = np.diff(jobs.arrival_s)
    span_s = float(jobs.arrival_s[-1] - jobs.arrival_s[0]) if len(jobs) else 0.0
    return {
        "source": trace.source,
        "kept": len(jobs),
        "left_out": dict(trace.left_out),
        "span_s": span_s,
        "gpus": {f"{count:g}": n for count, n in _counts(jobs.gpus)},
        "duration_s": {**spread(durations[known]), "unknown": int((~known).sum())},
        "gpu_hours": float((jobs.gpus * durations)[known].sum() / 3600) if known.any() else None,
        "rate_per_h": (len(jobs) - 1) / span_s * 3600 if span_s > 0 else None,
        "interarrival_cv": float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() > 0 else None,
        "models": _names(jobs.model.tolist()),
        "tenants": _names(jobs.tenant.tolist()),
        "with_deadline": int((~np.isnan(jobs.deadline_s)).sum()),
        "seed": trace.seed,
        "remarks": [*trace.remarks, *_lopsided(jobs.arrival_s)],
    }


def _lopsided(arrival_s: Floats) -> list[str]:
    """Return a remark if the trace begins with a long time almost without jobs, which makes rates and loads
    meaningless.
    """
    if len(arrival_s) < 100:
        return []
    start, lead, end = float(arrival_s[0]), float(arrival_s[len(arrival_s) // 100]), float(arrival_s[-1])
    if lead - start <= (end - start) / 4:
        return []
    return [
        f"99 % of the jobs arrive in the last {format_seconds(end - lead)} of {format_seconds(end - start)}; "
        f"--from {lead / 86400:.3g}d starts there"
    ]


def spread(values: Floats) -> dict[str, float | None]:
    """Return min, mean, quantiles (linear) and max; None where there are no values."""
    if not len(values):
        return dict.fromkeys(("min", "mean", *QUANTILES, "max"))
    quantiles = np.quantile(values, list(QUANTILES.values()))
    return {
        "min": float(values.min()),
        "mean": float(values.mean()),
        **{name: float(value) for name, value in zip(QUANTILES, quantiles, strict=True)},
        "max": float(values.max()),
    }


def _counts(values: Floats) -> list[tuple[float, int]]:
    found, counts = np.unique(values, return_counts=True)
    return list(zip(found.tolist(), counts.tolist(), strict=True))


def _names(values: list[str]) -> dict[str, int]:
    """Return how often each text occurs, most frequent first, without ""."""
    from collections import Counter

    return {name: n for name, n in Counter(values).most_common() if name}
