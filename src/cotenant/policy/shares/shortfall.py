"""Determines whether a tenant gets its promised share of the time in which it wanted the GPU, and since when it does
not.
"""

from __future__ import annotations

from typing import NamedTuple

MARGIN = 0.02  # fraction of the GPU: a smaller shortfall is noise of turns that do not end with the window


class Wanted(NamedTuple):
    """The fractions of a window's time in which a tenant had a GPU, and in which it had it or waited for it."""

    got: float
    wanted: float


def part_of(window: Wanted, request: float) -> float:
    """The request's worth in a window: a tenant that wants the GPU half of the time is promised half of it."""
    return request * min(1.0, window.wanted)


def short_since(before_ns: int | None, now_ns: int, window: Wanted, request: float) -> int | None:
    """Start of a tenant's present shortfall; None without one. `before_ns`: the previous result."""
    if window.got >= part_of(window, request) - MARGIN:
        return None
    return now_ns if before_ns is None else before_ns
