"""Account of one tenant on one GPU: its share, its sliding window, its rank in line."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

SECOND_NS = 1_000_000_000
MS_NS = 1_000_000


@dataclass(frozen=True)
class Share:
    """The share of one GPU's time promised to a tenant.

    `request` and `limit` are fractions 0..1 of the window; `priority` (larger first) and `weight` are used by some
    disciplines. `gang` names all GPUs that must be granted together, or is empty.
    """

    request: float = 0.0
    limit: float = 1.0
    priority: int = 0
    weight: float = 0.0
    gang: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 <= self.request <= 1.0:
            raise ValueError(f"request {self.request} is not between 0 and 1")
        if not 0.0 < self.limit <= 1.0:
            raise ValueError(f"limit {self.limit} is not over 0 and at most 1")
        if self.request > self.limit:
            raise ValueError(f"request {self.request} is over the limit {self.limit}")
        if self.weight < 0.0:
            raise ValueError(f"weight {self.weight} is negative")


HELD, FREE, IDLE = 0, 1, 2  # kinds of spans


class Window:
    """Exact sums over a sliding window of `window_ns`: time held while others waited, time held without waiters, and
    idle time.

    Spans are appended in order of time and do not overlap. Trimming cuts the oldest span at the window's edge, so the
    sums are exact at any instant and cost O(1) amortised. Times passed in must not decrease.
    """

    __slots__ = ("spans", "sums", "window_ns")

    def __init__(self, window_ns: int) -> None:
        self.window_ns = window_ns
        self.spans: deque[tuple[int, int, int]] = deque()
        self.sums = [0, 0, 0]

    @property
    def held_ns(self) -> int:
        """Time held, contended or not."""
        return self.sums[HELD] + self.sums[FREE]

    def add(self, start_ns: int, end_ns: int, kind: int = HELD) -> None:
        """Append a span of kind HELD, FREE (held without waiters) or IDLE (not requested, gives no claim)."""
        if end_ns <= start_ns:
            return
        spans = self.spans
        if spans and spans[-1][1] == start_ns and spans[-1][2] == kind:
            spans[-1] = (spans[-1][0], end_ns, kind)
        else:
            spans.append((start_ns, end_ns, kind))
        self.sums[kind] += end_ns - start_ns

    def trim(self, now_ns: int) -> None:
        """Drop what lies before now - window."""
        edge = now_ns - self.window_ns
        spans = self.spans
        while spans and spans[0][0] < edge:
            start, end, kind = spans[0]
            self.sums[kind] -= min(end, edge) - start
            if end <= edge:
                spans.popleft()
            else:
                spans[0] = (edge, end, kind)
                break

    def shed_at(self, excess_ns: float, idle_rate: float, now_ns: int) -> int:
        """First instant at which the window's sum (held + idle_rate * idle) has fallen by more than `excess_ns`."""
        if excess_ns < 0:
            return now_ns
        for start, end, kind in self.spans:
            rate = idle_rate if kind == IDLE else 1.0
            weight = (end - start) * rate
            if weight > excess_ns:
                return max(now_ns, start + int(excess_ns / rate) + 1000 + self.window_ns)
            excess_ns -= weight
        return max(now_ns, (self.spans[-1][1] if self.spans else now_ns) + self.window_ns + 1)


class Crowd:
    """Number of tenants of one GPU that hold it or wait for it, and the last time it was more than one."""

    __slots__ = ("_shared_ns", "active")

    def __init__(self) -> None:
        self.active = 0
        self._shared_ns: int | None = None

    def enter(self, now_ns: int) -> None:
        """One more tenant holds the GPU or waits for it."""
        self.active += 1
        if self.active > 1 or self._shared_ns is None:  # nothing is known about the time before the first
            self._shared_ns = now_ns

    def leave(self, now_ns: int) -> None:
        """A tenant no longer holds the GPU or waits for it."""
        if self.active > 1:
            self._shared_ns = now_ns
        self.active -= 1

    def is_alone(self, now_ns: int, for_ns: int) -> bool:
        """Whether the holder has been the only tenant that wanted the GPU for so long."""
        return self.active == 1 and self._shared_ns is not None and now_ns - self._shared_ns >= for_ns


@dataclass(eq=False)
class Account:
    """One tenant on one GPU: promise, use so far, and whether it waits. Times in nanoseconds of one clock."""

    name: str
    share: Share
    window: Window
    crowd: Crowd
    waiting: bool = False
    requested_ns: int = 0
    ticket: int = 0
    burst_ns: int = 0
    quota_ns: int = 0
    served: float = 0.0  # time held while others waited, over weight: the credit of weighted round robin
    idle_since_ns: int | None = None
    gap_ns: int = 0  # duration of its last idle period
    turn_start_ns: int | None = None  # set while it holds the GPU
    contended_ns: int | None = None  # time since which others wait for the current turn
    turns: int = 0
    held_ns: int = 0
    waited_ns: int = 0
    overrun_ns: int = 0

    @property
    def weight(self) -> float:
        """Weight of weighted round robin: as given, else the request, else 1."""
        return self.share.weight or self.share.request or 1.0

    def turn_ns(self, now_ns: int) -> int:
        """Length so far of the current turn within the window; 0 without one."""
        if self.turn_start_ns is None:
            return 0
        return now_ns - max(self.turn_start_ns, now_ns - self.window.window_ns)

    def contended_so_far_ns(self, now_ns: int) -> int:
        """Time of the current turn during which others waited."""
        return 0 if self.contended_ns is None else max(0, now_ns - self.contended_ns)

    def held_so_far_ns(self, now_ns: int) -> int:
        """Total time held, including the current turn."""
        return self.held_ns + (now_ns - self.turn_start_ns if self.turn_start_ns is not None else 0)

    def used_ns(self, now_ns: int, rate: float) -> float:
        """Time that counts for ranking: held while others waited, plus `rate` of the rest of the window.

        Time held without waiters took nothing from others, and idle time gives no claim: both count as if the tenant
        had had exactly its share. So a tenant that arrives or returns starts level, and no other is delayed to make up
        for it.
        """
        window = self.window
        window.trim(now_ns)
        held, free, idle = window.sums
        if self.turn_start_ns is not None:
            since_ns = now_ns if self.contended_ns is None else max(self.contended_ns, now_ns - window.window_ns)
            held += now_ns - since_ns
            free += since_ns - max(self.turn_start_ns, now_ns - window.window_ns)
        return held + rate * (free + idle)

    def budget_ns(self, now_ns: int) -> float:
        """Remainder of the limit in the window that ends now; negative if exceeded."""
        window = self.window
        window.trim(now_ns)
        limit = self.share.limit
        if limit >= 1.0:
            return float(window.window_ns)
        return limit * (window.window_ns - window.sums[IDLE]) - window.held_ns - self.turn_ns(now_ns)

    def eligible_at_ns(self, now_ns: int) -> int:
        """First instant at which the limit lets this tenant start a turn (now, if it already does)."""
        budget = self.budget_ns(now_ns)
        if budget > 0:
            return now_ns
        return self.window.shed_at(-budget, self.share.limit, now_ns)
