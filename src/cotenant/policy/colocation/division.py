"""Divides a GPU's budget of best-effort work in flight among the best-effort processes that have launched kernels
recently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from typing import TypeVar

QUIET_NS = 50_000_000  # a process that has launched nothing for this long is idle
# Time between two updates of the division of the budget. It is so long that work launched before an update, under the
# old division, has ended when the next update comes.
LOOK_NS = 10_000_000
# The number of parts of an idle or new process. A process with n parts may have 1 / n of the budget in flight. For n =
# APART this is less than 1 ns of any budget, so `share_ns` returns its least value, with which the process may launch
# only one kernel at a time.
APART = 0xFFFFFFFF

Key = TypeVar("Key")


def share_ns(budget_ns: int, parts: int) -> int:
    """Return the in-flight budget of a process that gets one of `parts` equal parts of `budget_ns`; floor_rule.h has
    the same rule in C. The result is at least 1 ns: a process may always launch a kernel when nothing is in flight.
    """
    return max(1, budget_ns // max(1, parts))


def next_parts(before: Mapping[Key, int], worked: Collection[Key]) -> dict[Key, int]:
    """Return for each process a number of parts: the process may have 1 / parts of the budget in flight. `before`: the
    previous numbers (APART for a new process); `worked`: the processes that have launched recently.

    Active processes divide the budget and idle ones get none; if all are idle, all divide it. A process uses the number
    that it read last, old or new, and work launched under the old number may be in flight until the next update. So the
    larger of its old and its new fraction of the budget is counted for each process. If these fractions fit into the
    budget together, all new numbers apply. Otherwise this update only reduces fractions, and the next one lets others
    grow.
    """
    busy = set(worked) & before.keys()
    of_all = len(busy) if busy else len(before)
    wanted = {key: of_all if key in busy or not busy else APART for key in before}
    if taken(min(parts, wanted[key]) for key, parts in before.items()) <= 1:
        return wanted
    return {key: max(parts, wanted[key]) for key, parts in before.items()}


def taken(parts: Iterable[int]) -> Fraction:
    """Return the fraction of the budget that processes with these numbers of parts may have in flight together."""
    counts = Counter(parts)
    return sum((Fraction(n, one) for one, n in counts.items() if one != APART), Fraction(0))
