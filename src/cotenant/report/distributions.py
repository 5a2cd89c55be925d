"""Distributions reduced to the points that a chart can show."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MOST_POINTS = 260


def quantile_grid(n: int) -> Floats:
    """Shares 0..1 at which a distribution of n values is drawn: every value if n is small, else denser toward the
    tail.
    """
    if n <= MOST_POINTS:
        return np.arange(1, n + 1) / n
    body = np.linspace(1 / n, 0.98, 180)
    tail = 1 - np.geomspace(0.02, 1 / n, 80)
    return np.unique(np.concatenate((body, tail, [1.0])))


def cdf_points(values: Floats) -> dict[str, Any]:
    """x: values, y: share of jobs at or below; NaN is left out; ends at the largest value."""
    known = np.sort(values[~np.isnan(values)])
    if len(known) == 0:
        return {"x": [], "y": []}
    share = quantile_grid(len(known))
    at = np.clip(np.ceil(share * len(known) - 1e-9).astype(int) - 1, 0, len(known) - 1)
    return {
        "x": rounded(known[at].tolist()),
        "y": rounded((np.searchsorted(known, known[at], "right") / len(known)).tolist()),
    }


def ratio_to(values: Floats, base: Floats) -> dict[str, Any] | None:
    """CDF of values / base per job, with the shares of jobs that became at least 1 % faster and slower."""
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
    """A number, or a list of numbers, rounded to significant figures; None for values that are not finite."""
    if isinstance(value, list):
        return [rounded(item, figures) for item in value]
    if value is None or not math.isfinite(value):
        return None
    if value == 0:
        return 0
    shortened = float(f"{value:.{figures}g}")
    return int(shortened) if shortened.is_integer() and abs(shortened) < 1e15 else shortened
