"""Confidence interval of the fraction of requests that keep their SLO, and the number of requests that is needed to
distinguish two such fractions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

REACHED_ALONE, WANTED = 0.995, 0.99


def wilson_interval(hits: int, count: int, confidence: float = 0.95) -> list[float]:
    """Return Wilson's score interval (1927) of a fraction with `hits` of `count`, valid also near 0 and 1. [0, 1] if
    count is 0.
    """
    if count == 0:
        return [0.0, 1.0]
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = hits / count
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    low = 0.0 if hits == 0 else (middle - half) / scale
    high = 1.0 if hits == count else (middle + half) / scale
    return [low, high]


def requests_to_tell(good: float = REACHED_ALONE, bad: float = WANTED, error: float = 0.05, power: float = 0.8) -> int:
    """Return the number of requests with which a one-sided test distinguishes a fraction of `bad` from one of `good`,
    with false alarms in `error` of the cases and detection in `power` of them.

    n = ((z(1 - error) sqrt(good (1 - good)) + z(power) sqrt(bad (1 - bad))) / (good - bad))^2, the normal approximation
    of two binomials (Fleiss, Statistical Methods for Rates and Proportions). Example: 1,597 requests distinguish 99 %
    from 99.5 %.
    """
    normal = NormalDist()
    root = normal.inv_cdf(1 - error) * math.sqrt(good * (1 - good)) + normal.inv_cdf(power) * math.sqrt(bad * (1 - bad))
    return math.ceil((root / (good - bad)) ** 2)


def attainment(latency_ms: Sequence[float], slo_ms: float) -> tuple[float, list[float]]:
    """Return the fraction of the requests answered within `slo_ms`, and its 95 % interval."""
    hits = sum(ms <= slo_ms for ms in latency_ms)
    return hits / max(1, len(latency_ms)), wilson_interval(hits, len(latency_ms))
