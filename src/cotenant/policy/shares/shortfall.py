"""Determines whether a tenant gets its requested share of the time in which it wanted the GPU, and since when it does
not.
"""

from __future__ import annotations

from typing import NamedTuple

# A tenant that lacks less than this fraction of the GPU's time counts as getting its share, since turns do not end
# exactly when the window ends. For a request below twice this value, the margin is half of the request.
MARGIN = 0.02


class Wanted(NamedTuple):
    """The fractions of a window in which a tenant had the GPU, and in which it had it or waited for it."""

    got: float
    wanted: float


def part_of(window: Wanted, request: float) -> float:
    """Return the share that a tenant should have got in a window: if it wanted the GPU half of the time, half of its
    request.
    """
    return request * min(1.0, window.wanted)


def short_since(before_ns: int | None, now_ns: int, window: Wanted, request: float) -> int | None:
    """Return the time since which a tenant gets less than its share; None if it gets enough. `before_ns`: the previous
    result.
    """
    if window.got >= part_of(window, request) - min(MARGIN, request / 2):
        return None
    return now_ns if before_ns is None else before_ns
