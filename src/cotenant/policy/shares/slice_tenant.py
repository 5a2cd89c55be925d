"""One tenant of a GPU under hardware time slices: its promise, its slice, and its usage. Times in nanoseconds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from cotenant.policy.shares.account import Share


class Usage(NamedTuple):
    """Usage since it joined: GPU time, number of runs, and number of runs that ended for lack of work (not at the end
    of a slice).
    """

    busy_ns: int = 0
    runs: int = 0
    yields: int = 0


IDLE_STEPS = 5  # number of steps without GPU time after which a tenant gets no turns


class Had(NamedTuple):
    """Usage in an interval: its length, the time on the GPU's list, and the usage."""

    span_ns: int = 0
    on_ns: int = 0
    usage: Usage = Usage()

    @property
    def part(self) -> float:
        """Fraction of the interval in which the tenant used the GPU."""
        return self.usage.busy_ns / self.span_ns if self.span_ns else 0.0


@dataclass(eq=False)
class SliceTenant:
    """One tenant on one GPU."""

    name: str
    share: Share
    work_class: str
    groups: int = 0  # compute groups that it has there
    slice_us: int = 0  # as set; 0: never
    on: bool = True
    correction: float = 1.0  # factor on its slice that corrects measured deviations
    duty: float = 1.0  # fraction of a period in which it may run
    density: float = 1.0  # used fraction of the time in which it alone may run
    brief: bool = False  # its work in flight is bounded while a latency-sensitive tenant works
    settled_ns: int = 0  # not stopped before
    idle_steps: int = 0  # the tenant is not stopped before this time
    debt_ns: float = 0.0  # time above its limit that is still to be compensated
    total: Usage = field(default_factory=Usage)
    history: deque[tuple[int, int, Usage]] = field(default_factory=deque)  # (when, time on the list, usage so far)
    _on_ns: int = 0
    _since_ns: int = 0

    @property
    def competes(self) -> bool:
        """Whether it has work, as far as known: it had the GPU recently, or has just joined."""
        return self.groups > 0 and self.idle_steps < IDLE_STEPS

    def put(self, on: bool, now_ns: int) -> None:
        """Count the tenant as on the GPU's list, or as off it, from now on."""
        if self.on:
            self._on_ns += now_ns - self._since_ns
        self.on, self._since_ns = on, now_ns

    def forget(self, now_ns: int) -> None:
        """Discard past measurements; `begin` is then called with the usage so far."""
        self.history.clear()
        if self.total == Usage():
            self.begin(Usage(), now_ns)

    def begin(self, total: Usage, now_ns: int) -> None:
        """Start measuring from this usage, unless already started."""
        self.put(self.on, now_ns)
        if not self.history:
            self.history.append((now_ns, self._on_ns, total))

    def had(self, now_ns: int, total: Usage, window_ns: int) -> Had:
        """Update with the usage since it joined; returns the usage since the last update."""
        self.put(self.on, now_ns)
        self.total = total
        self.history.append((now_ns, self._on_ns, total))
        while len(self.history) > 2 and self.history[1][0] <= now_ns - window_ns:
            self.history.popleft()
        return self._since(-2) if len(self.history) > 1 else Had()

    def window(self) -> Had:
        """Usage in the window, as far as known."""
        return self._since(0) if self.history else Had()

    def since(self, then_ns: int) -> Had:
        """Usage since that time, as far as the window reaches."""
        index = next((i for i, (at_ns, *_) in enumerate(self.history) if at_ns >= then_ns), len(self.history))
        return self._since(index) if index < len(self.history) else Had()

    def _since(self, index: int) -> Had:
        (then_ns, then_on_ns, then), (now_ns, on_ns, total) = self.history[index], self.history[-1]
        more = Usage(total.busy_ns - then.busy_ns, total.runs - then.runs, total.yields - then.yields)
        return Had(now_ns - then_ns, on_ns - then_on_ns, more)

    def has_gaps(self) -> bool:
        """Whether most of its runs ended for lack of work."""
        usage = self.window().usage
        return usage.runs > 0 and usage.yields > 0.5 * usage.runs
