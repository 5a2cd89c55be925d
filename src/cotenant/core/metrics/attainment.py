"""Confidence interval of the fraction of requests that keep their SLO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

# Number of requests with which a one-sided test distinguishes 99 % in time from 99.5 %, with false alarms in 5 % of the
# cases and detection in 80 % of them. With the normal approximation of two binomials (Fleiss, Statistical Methods for
# Rates and Proportions) it is ((z(0.95) sqrt(0.995 0.005) + z(0.8) sqrt(0.99 0.01)) / 0.005)^2.
REQUESTS_TO_TELL = 1597


def wilson_interval(hits: int, count: int) -> list[float]:
    """Return Wilson's 95 % score interval (1927) of a fraction with `hits` of `count`, valid also near 0 and 1. [0, 1]
    if count is 0.
    """
    if count == 0:
        return [0.0, 1.0]
    z = NormalDist().inv_cdf(0.975)
    share = hits / count
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    low = 0.0 if hits == 0 else (middle - half) / scale
    high = 1.0 if hits == count else (middle + half) / scale
    return [low, high]


def attainment(latency_ms: Sequence[float], slo_ms: float) -> tuple[float, list[float]]:
    """Return the fraction of the requests answered within `slo_ms`, and its 95 % interval."""
    hits = sum(ms <= slo_ms for ms in latency_ms)
    return hits / max(1, len(latency_ms)), wilson_interval(hits, len(latency_ms))
