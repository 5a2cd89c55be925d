"""Distributions reduced to the points that a chart can show."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MOST_POINTS = 260
WINDOWS = 6, 60  # fewest and most windows of a run
WINDOW_REQUESTS = 5  # mean number of requests in a window, where the fewest and most windows allow it
POINTS = 200  # number of points of a curve of latencies


def quantile_grid(n: int) -> Floats:
    """Return the shares 0..1 at which a distribution of n values is drawn: every value if n is small, else denser
    toward the tail.
    """
    if n <= MOST_POINTS:
        return np.arange(1, n + 1) / n
    body = np.linspace(1 / n, 0.98, 180)
    tail = 1 - np.geomspace(0.02, 1 / n, 80)
    return np.unique(np.concatenate((body, tail, [1.0])))


def cdf_points(values: Floats, of: int | None = None) -> dict[str, Any]:
    """Return the points of a cumulative distribution: x: values, y: share of jobs at or below x. NaN is left out; the
    last point is the largest value. `of`: the number that is 100 %, by default that of the values without NaN.
    """
    known = np.sort(values[~np.isnan(values)])
    if len(known) == 0:
        return {"x": [], "y": []}
    share = quantile_grid(len(known))
    at = np.clip(np.ceil(share * len(known) - 1e-9).astype(int) - 1, 0, len(known) - 1)
    return {
        "x": rounded(known[at].tolist()),
        "y": rounded((np.searchsorted(known, known[at], "right") / (of or len(known))).tolist()),
    }


class Windows:
    """A run of duration `length`, divided into equal windows, of which a run with few requests has fewer; `at`: time at
    which each request came, in the same unit.
    """

    def __init__(self, at: Floats, length: float) -> None:
        self.count = int(np.clip(len(at) // WINDOW_REQUESTS, *WINDOWS))
        edges = np.linspace(0.0, length, self.count + 1)
        self.middles: Floats = (edges[:-1] + edges[1:]) / 2
        self._where = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, self.count - 1)

    def attainment(self, mine: NDArray[np.bool_], good: NDArray[np.bool_]) -> list[float | None]:
        """Return for each window which share of the requests in `mine` is also in `good`; None for a window without
        requests in `mine`.
        """
        sent = np.bincount(self._where[mine], minlength=self.count)
        kept = np.bincount(self._where[mine & good], minlength=self.count)
        return [None if n == 0 else rounded(float(k / n)) for k, n in zip(kept, sent, strict=True)]


def latency_curve(name: str, slo_ms: float | None, latency_ms: Floats, sent: int) -> dict[str, Any]:
    """Return a service's distribution of latency as a chart draws it; the shares are of all `sent` requests."""
    times = np.sort(latency_ms)
    at = np.unique(np.linspace(0, len(times) - 1, POINTS).astype(int)) if len(times) else np.zeros(0, int)
    return {
        "name": name, "slo_ms": slo_ms, "latency_ms": [round(float(x), 4) for x in times[at]],
        "share": [round((float(i) + 1) / max(1, sent), 6) for i in at],
    }  # fmt: skip


def ratio_to(values: Floats, base: Floats) -> dict[str, Any] | None:
    """Return the cumulative distribution of values / base over jobs, with the shares of jobs that became at least 1 %
    faster and slower.
    """
    known = ~np.isnan(values) & ~np.isnan(base) & (base > 0)
    if not known.any():
        return None
    ratio = values[known] / base[known]
    return {
        **cdf_points(ratio),
        "faster": rounded(float((ratio < 0.99).mean())),
        "slower": rounded(float((ratio > 1.01).mean())),
    }


def rounded(value: Any, figures: int = 5) -> Any:
    """Return a number, or a list of numbers, rounded to significant figures; None for values that are not finite."""
    if isinstance(value, list):
        return [rounded(item, figures) for item in value]
    if value is None or not math.isfinite(value):
        return None
    if value == 0:
        return 0
    shortened = float(f"{value:.{figures}g}")
    return int(shortened) if shortened.is_integer() and abs(shortened) < 1e15 else shortened
