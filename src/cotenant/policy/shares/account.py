"""The account of one tenant on one GPU: its share of the time, its use in a sliding window, and from both its rank
among the tenants that wait for a *turn*, a time slice that the agent grants.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

SECOND_NS = 1_000_000_000
MS_NS = 1_000_000


@dataclass(frozen=True)
class Share:
    """The share of one GPU's time that a tenant is entitled to.

    `request` (what it gets at least) and `limit` are fractions 0..1 of the window. `priority` (larger first) and
    `weight` are used by some disciplines. `gang` names all GPUs that the tenant must get at the same time, or is empty.
    """

    request: float = 0.0
    limit: float = 1.0
    priority: int = 0
    weight: float = 0.0
    gang: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 <= self.request <= 1.0:
            raise ValueError(f"request {self.request} must be between 0 and 1")
        if not 0.0 < self.limit <= 1.0:
            raise ValueError(f"limit {self.limit} must be above 0 and at most 1")
        if self.request > self.limit:
            raise ValueError(f"request {self.request} is above the limit {self.limit}")
        if self.weight < 0.0:
            raise ValueError(f"weight {self.weight} is negative")


# kinds of a tenant's time spans: it held the GPU while others waited, it held the GPU while none waited, it was idle
HELD, FREE, IDLE = 0, 1, 2


class Window:
    """Exact sums over a sliding window of `window_ns`: time in which a tenant held the GPU while others waited, time in
    which the tenant held the GPU while none waited, and time in which it was idle.

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
        """Return the time in ns for which the tenant held the GPU, whether others waited or not."""
        return self.sums[HELD] + self.sums[FREE]

    def add(self, start_ns: int, end_ns: int, kind: int = HELD) -> None:
        """Append a span of time to the window: HELD (the tenant held the GPU while others waited), FREE (it held the
        GPU while none waited) or IDLE (it did not want the GPU). `Account.used_ns` says how each counts.
        """
        if end_ns <= start_ns:
            return
        spans = self.spans
        if spans and spans[-1][1] == start_ns and spans[-1][2] == kind:
            spans[-1] = (spans[-1][0], end_ns, kind)
        else:
            spans.append((start_ns, end_ns, kind))
        self.sums[kind] += end_ns - start_ns

    def trim(self, now_ns: int) -> None:
        """Remove the spans, or parts of spans, before the window that ends now."""
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
        """Return the first instant after `now_ns` at which the window's sum (held + idle_rate * idle) has fallen by
        more than `excess_ns`.
        """
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
    """Counts how many tenants hold one GPU or wait for it, and records when it was last more than one."""

    __slots__ = ("_shared_ns", "active")

    def __init__(self) -> None:
        self.active = 0
        self._shared_ns: int | None = None

    def enter(self, now_ns: int) -> None:
        """Record that another tenant holds the GPU or waits for it."""
        self.active += 1
        # the time before the first tenant came is unknown, so it does not count as time alone
        if self.active > 1 or self._shared_ns is None:
            self._shared_ns = now_ns

    def leave(self, now_ns: int) -> None:
        """Record that a tenant no longer holds the GPU or waits for it."""
        if self.active > 1:
            self._shared_ns = now_ns
        self.active -= 1

    def is_alone(self, now_ns: int, for_ns: int) -> bool:
        """Whether one tenant has been the only one that wanted the GPU for at least `for_ns`."""
        return self.active == 1 and self._shared_ns is not None and now_ns - self._shared_ns >= for_ns


@dataclass(eq=False)
class Account:
    """One tenant on one GPU: its share, its use so far, and whether it waits. Times are nanoseconds of one clock."""

    name: str
    share: Share
    window: Window
    crowd: Crowd
    waiting: bool = False
    requested_ns: int = 0
    ticket: int = 0
    burst_ns: int = 0
    quota_ns: int = 0
    # time used while other tenants waited, divided by the tenant's weight; weighted round robin ranks tenants by it
    served: float = 0.0
    idle_since_ns: int | None = None
    gap_ns: int = 0  # duration of the tenant's last idle time
    turn_start_ns: int | None = None  # start of the tenant's current turn; None: the tenant does not hold the GPU
    # time from which the tenant's current turn is charged to it, because another tenant waits; None: none has waited
    contended_ns: int | None = None
    turns: int = 0
    held_ns: int = 0
    waited_ns: int = 0
    overrun_ns: int = 0

    @property
    def weight(self) -> float:
        """Return the tenant's weight for weighted round robin: the weight if given, otherwise the request, otherwise 1.
        """
        return self.share.weight or self.share.request or 1.0

    def turn_ns(self, now_ns: int) -> int:
        """Return how long the tenant's current turn (the time that it holds the GPU) has lasted, counted from the
        window's start at the earliest; 0 without a turn.
        """
        if self.turn_start_ns is None:
            return 0
        return now_ns - max(self.turn_start_ns, now_ns - self.window.window_ns)

    def contended_so_far_ns(self, now_ns: int) -> int:
        """Return the time in ns of the tenant's current turn (the time that it holds the GPU) during which others
        waited.
        """
        return 0 if self.contended_ns is None else max(0, now_ns - self.contended_ns)

    def held_so_far_ns(self, now_ns: int) -> int:
        """Return the total time in ns that the tenant has held the GPU, including the current turn."""
        return self.held_ns + (now_ns - self.turn_start_ns if self.turn_start_ns is not None else 0)

    def waited_so_far_ns(self, now_ns: int) -> int:
        """Return the total time in ns that the tenant has waited for turns, including the current wait."""
        return self.waited_ns + (now_ns - self.requested_ns if self.waiting else 0)

    def used_ns(self, now_ns: int, rate: float) -> float:
        """Return the time in ns that counts for the tenant's rank: time held while others waited, plus `rate` of the
        rest of the window.

        Time held while none waited took nothing from others, and idle time gives no claim to more time later. Both
        kinds of time count as if the tenant had had exactly its share. So a tenant that arrives or returns has neither
        a claim nor a debt, and no other is delayed to make up for it.
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
        """Return how many ns of the tenant's limit are left in the window that ends now; negative if it is exceeded."""
        window = self.window
        window.trim(now_ns)
        limit = self.share.limit
        if limit >= 1.0:
            return float(window.window_ns)
        return limit * (window.window_ns - window.sums[IDLE]) - window.held_ns - self.turn_ns(now_ns)

    def eligible_at_ns(self, now_ns: int) -> int:
        """Return the first instant at which the limit lets this tenant start a turn, that is hold the GPU; now, if the
        limit allows it already.
        """
        budget = self.budget_ns(now_ns)
        if budget > 0:
            return now_ns
        return self.window.shed_at(-budget, self.share.limit, now_ns)
