"""Whether a tenant gets what it was promised of the time in which it wanted the GPU, and since when it does not."""

from __future__ import annotations

from typing import NamedTuple

MARGIN = 0.02  # of the GPU: less is the noise of turns that do not end with the window


class Wanted(NamedTuple):
    """Of a window's time, the part that a tenant had of a GPU, and the part in which it had it or waited for it."""

    got: float
    wanted: float


def part_of(window: Wanted, request: float) -> float:
    """What its request is worth in a window: who wants the GPU half of the time is promised half of it."""
    return request * min(1.0, window.wanted)


def short_since(before_ns: int | None, now_ns: int, window: Wanted, request: float) -> int | None:
    """Since when a tenant has had less than its promise; None while it has not. `before_ns`: the last answer."""
    if window.got >= part_of(window, request) - MARGIN:
        return None
    return now_ns if before_ns is None else before_ns
