"""Chooses how much best-effort (BE) work may run at the same time as latency-sensitive (LS) work, from a measured
curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CurvePoint:
    """A measurement: an LS request took `slowdown` times as long as alone, while BE work ran on `be_sms` of the SMs for
    the fraction `overlap` of the time, with `gb_per_s` of memory bandwidth.
    """

    overlap: float
    slowdown: float
    gb_per_s: float = 0.0
    be_sms: float = 0.0


def choose_budget(curve: Sequence[CurvePoint], tolerated: float) -> CurvePoint:
    """Return the point of the curve with the most BE work at which LS requests take at most `tolerated` times as long
    as alone (1.05: 5 % longer).

    Between two measured points with the same `be_sms`, points are interpolated along `overlap`. A curve that crosses
    the limit several times is cut at the first crossing, since what follows is noise. If no point qualifies, the result
    has no overlap.
    """
    best = CurvePoint(0.0, 1.0)
    for be_sms in sorted({point.be_sms for point in curve}):
        points = sorted((point for point in curve if point.be_sms == be_sms), key=lambda point: point.overlap)
        last = CurvePoint(0.0, 1.0, 0.0, be_sms)
        for point in points:
            if point.slowdown > tolerated:
                if point.slowdown > last.slowdown:
                    part = (tolerated - last.slowdown) / (point.slowdown - last.slowdown)
                    last = _between(last, point, max(0.0, part))
                break
            last = point
        if (last.gb_per_s, last.overlap) > (best.gb_per_s, best.overlap):
            best = last
    return best


def _between(low: CurvePoint, high: CurvePoint, part: float) -> CurvePoint:
    def mix(a: float, b: float) -> float:
        return a + (b - a) * part

    return CurvePoint(
        mix(low.overlap, high.overlap), mix(low.slowdown, high.slowdown), mix(low.gb_per_s, high.gb_per_s), low.be_sms
    )
