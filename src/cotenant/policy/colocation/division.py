"""How best-effort processes of a GPU divide its bound of work in flight: among those that have worked lately."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from typing import TypeVar

QUIET_NS = 50_000_000  # without a launch for so long: idle
LOOK_NS = 10_000_000  # between two decisions; what was in flight under the one before has ended by then
APART = 0xFFFFFFFF  # parts of a process that is not counted: one launch at a time

Key = TypeVar("Key")


def share_ns(budget_ns: int, parts: int) -> int:
    """What a process may have in flight that has one of `parts` parts of `budget_ns`; floor_rule.h is the same
    in C. 1 ns, not 0, for one that has none: a launch with nothing in front of it goes whatever it takes."""
    return max(1, budget_ns // max(1, parts))


def next_parts(before: Mapping[Key, int], worked: Collection[Key]) -> dict[Key, int]:
    """Each process's parts after a look, by what it had `before` (APART: it is new) and which have `worked` lately.

    Those that worked divide the bound, an idle one has no part; where all are idle, all divide it. A process obeys what
    it last read, old or new, and work that was launched under the old number takes until the next look to end. So a
    part becomes larger only if the larger of old and new of all of them fit into the bound together; else this look
    only makes parts smaller, and the next one finds the room.
    """
    busy = set(worked) & before.keys()
    of_all = len(busy) if busy else len(before)
    wanted = {key: of_all if key in busy or not busy else APART for key in before}
    if taken(min(parts, wanted[key]) for key, parts in before.items()) <= 1:
        return wanted
    return {key: max(parts, wanted[key]) for key, parts in before.items()}


def taken(parts: Iterable[int]) -> Fraction:
    """What part of the bound these processes may have in flight together."""
    counts = Counter(parts)
    return sum((Fraction(n, one) for one, n in counts.items() if one != APART), Fraction(0))
