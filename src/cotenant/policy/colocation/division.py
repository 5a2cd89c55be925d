"""Splits a GPU's in-flight budget among the best-effort processes that were recently active."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from typing import TypeVar

QUIET_NS = 50_000_000  # a process without a launch for this long is idle
LOOK_NS = 10_000_000  # interval between two splits; work in flight under the previous one has ended by then
APART = 0xFFFFFFFF  # shares of a process that is not counted: one launch at a time

Key = TypeVar("Key")


def share_ns(budget_ns: int, parts: int) -> int:
    """In-flight budget of a process with one of `parts` shares of `budget_ns`; floor_rule.h is the same in C. At least
    1 ns: a launch with nothing in front of it may always go.
    """
    return max(1, budget_ns // max(1, parts))


def next_parts(before: Mapping[Key, int], worked: Collection[Key]) -> dict[Key, int]:
    """Each process's shares after an update, from what it had `before` (APART: new) and which processes have `worked`
    recently.

    Active processes split the budget and idle ones get none; if all are idle, all split it. A process uses the number
    that it last read, old or new, and work launched under the old number may be in flight until the next update. So a
    share grows only if the larger of the old and new shares of all processes fit into the budget together; otherwise
    this update only shrinks shares, and the next one lets others grow.
    """
    busy = set(worked) & before.keys()
    of_all = len(busy) if busy else len(before)
    wanted = {key: of_all if key in busy or not busy else APART for key in before}
    if taken(min(parts, wanted[key]) for key, parts in before.items()) <= 1:
        return wanted
    return {key: max(parts, wanted[key]) for key, parts in before.items()}


def taken(parts: Iterable[int]) -> Fraction:
    """The fraction of the budget that these processes may have in flight together."""
    counts = Counter(parts)
    return sum((Fraction(n, one) for one, n in counts.items() if one != APART), Fraction(0))
