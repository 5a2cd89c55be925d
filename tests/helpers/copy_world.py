"""A simulated link in virtual time, on which programs copy by the scheduling rule; tests look at the shares and waits
that result."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from copy_oracle import Link, Queue

from cotenant.abi.copy_page import CopyRank
from cotenant.policy.copies import CopySettings

START_NS = 10**9
LINK_BYTES_PER_NS = 55.0
GAP_NS = 5_000  # idle time of the link between two chunks
LAUNCH_NS = 3_000  # time from a grant to the first byte on the link


@dataclass
class Program:
    """Copies `size` bytes again and again, with `think_ns` between the end of one copy and the next. None: the program
    always has copies queued."""

    weight: float = 1.0
    size: int = 64 << 20
    think_ns: int | None = None
    rank: CopyRank = CopyRank.NORMAL
    begin_ns: int = 0
    left: int = 0
    flying: int = 0
    moved: int = 0
    asked_ns: int = 0
    # for each copy, the time from its start to the grant of its last chunk
    waits_ns: list[int] = field(default_factory=list)


@dataclass
class Grant:
    """One turn."""

    at_ns: int
    number: int
    size: int
    others_flying: int


class World:
    """Programs on one link. `seen_ns`: range (from, to) of the delay until the end of a chunk is noticed."""

    def __init__(
        self,
        settings: CopySettings,
        programs: list[Program],
        *,
        seen_ns: tuple[int, int] = (2_000, 8_000),
        seed: int = 0,
    ) -> None:
        self.settings, self.programs = settings, programs
        self.link = Link(settings, queues=[Queue() for _ in programs])
        for number, program in enumerate(programs):
            queue = self.link.queues[number]
            queue.weight_milli, queue.rank = round(program.weight * 1000), program.rank
        self.now_ns = self.free_ns = START_NS
        self.grants: list[Grant] = []
        self._random = random.Random(seed)
        self._seen_ns = seen_ns
        self._events: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = itertools.count()
        for number, program in enumerate(programs):
            self._at(START_NS + program.begin_ns, self._begin, number)

    def _at(self, when_ns: int, what: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (when_ns, next(self._serial), what, arguments))

    def _begin(self, number: int) -> None:
        program = self.programs[number]
        program.left = program.size
        program.asked_ns = self.now_ns

    def _done(self, number: int, place: int, size: int) -> None:
        program = self.programs[number]
        self.link.done(place)
        program.flying -= 1
        program.moved += size
        if program.think_ns is None:
            if program.left < program.size:
                program.left += program.size
        elif program.left == 0 and program.flying == 0:
            self._at(self.now_ns + program.think_ns, self._begin, number)

    def _ask(self, number: int) -> bool:
        program = self.programs[number]
        size = min(self.link.piece_bytes(number, self.now_ns), program.left)
        place = self.link.ask(number, number + 1, size, self.now_ns)
        if place is None:
            return False
        flying = sum(other.flying for other in self.programs) - program.flying
        self.grants.append(Grant(self.now_ns, number, size, flying))
        program.left -= size
        program.flying += 1
        if program.left == 0:
            self.link.withdraw(number)
            program.waits_ns.append(self.now_ns - program.asked_ns)
        begin_ns = max(self.free_ns, self.now_ns + LAUNCH_NS)
        self.free_ns = begin_ns + round(size / LINK_BYTES_PER_NS) + GAP_NS
        self._at(self.free_ns + self._random.randint(*self._seen_ns), self._done, number, place, size)
        return True

    def _everyone_asks(self) -> None:
        """Let all programs request chunks until none is granted. The order is random, as that of processes which poll
        on their own."""
        again = True
        while again:
            waiting = [number for number, program in enumerate(self.programs) if program.left > 0]
            self._random.shuffle(waiting)
            again = sum(self._ask(number) for number in waiting) > 0

    def run(self, seconds: float) -> World:
        """Simulate that many seconds."""
        end_ns = self.now_ns + round(seconds * 1e9)
        while self._events and self._events[0][0] <= end_ns:
            self.now_ns, _, what, arguments = heapq.heappop(self._events)
            what(*arguments)
            if not self._events or self._events[0][0] > self.now_ns:
                self._everyone_asks()
        return self

    def shares(self) -> list[float]:
        """Fraction of all moved bytes, by program."""
        total = sum(program.moved for program in self.programs)
        return [program.moved / total for program in self.programs]

    def busy(self) -> float:
        """Bytes moved, as a fraction of those that the link could have moved."""
        span_ns = self.now_ns - START_NS
        return sum(program.moved for program in self.programs) / (span_ns * LINK_BYTES_PER_NS)
