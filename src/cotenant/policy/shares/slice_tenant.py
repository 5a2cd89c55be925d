"""One tenant of a GPU whose hardware takes turns: its promise, its slice, and what it had. Times in nanoseconds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from cotenant.policy.shares.account import Share


class Usage(NamedTuple):
    """What a tenant has had since it came: GPU time, how often it began to run, and how often it ended for want of
    work (not at the end of its slice)."""

    busy_ns: int = 0
    runs: int = 0
    yields: int = 0


IDLE_STEPS = 5  # without the GPU, before a tenant has no turns


class Had(NamedTuple):
    """What a tenant had in a stretch of time: its length, how much of it it was on the GPU's list, and its usage."""

    span_ns: int = 0
    on_ns: int = 0
    usage: Usage = Usage()

    @property
    def part(self) -> float:
        """Of the time."""
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
    correction: float = 1.0  # of its slice, for what it got
    duty: float = 1.0  # part of a period in which it may run
    density: float = 1.0  # of the time in which it may run alone, what it uses
    idle_steps: int = 0  # since it last had the GPU
    debt_ns: float = 0.0  # time over its limit that is still to be made up for
    total: Usage = field(default_factory=Usage)
    history: deque[tuple[int, int, Usage]] = field(default_factory=deque)  # (when, time on the list, usage so far)
    _on_ns: int = 0
    _since_ns: int = 0

    @property
    def competes(self) -> bool:
        """Whether it has work, as far as that is known: it has had the GPU of late, or has just come."""
        return self.groups > 0 and self.idle_steps < IDLE_STEPS

    def put(self, on: bool, now_ns: int) -> None:
        """On the GPU's list or off it, from now on."""
        if self.on:
            self._on_ns += now_ns - self._since_ns
        self.on, self._since_ns = on, now_ns

    def forget(self, now_ns: int) -> None:
        """What it had before tells nothing any more; `begin` is called with what it has had until now."""
        self.history.clear()
        if self.total == Usage():
            self.begin(Usage(), now_ns)

    def begin(self, total: Usage, now_ns: int) -> None:
        """What it has from now on counts, if nothing does yet."""
        self.put(self.on, now_ns)
        if not self.history:
            self.history.append((now_ns, self._on_ns, total))

    def had(self, now_ns: int, total: Usage, window_ns: int) -> Had:
        """Take what it has had since it came; what it had since the last time."""
        self.put(self.on, now_ns)
        self.total = total
        self.history.append((now_ns, self._on_ns, total))
        while len(self.history) > 2 and self.history[1][0] <= now_ns - window_ns:
            self.history.popleft()
        return self._since(-2) if len(self.history) > 1 else Had()

    def window(self) -> Had:
        """What it had in the window, as far as that is known."""
        return self._since(0) if self.history else Had()

    def since(self, then_ns: int) -> Had:
        """What it had from then on, within the window."""
        index = next((i for i, (at_ns, *_) in enumerate(self.history) if at_ns >= then_ns), len(self.history))
        return self._since(index) if index < len(self.history) else Had()

    def _since(self, index: int) -> Had:
        (then_ns, then_on_ns, then), (now_ns, on_ns, total) = self.history[index], self.history[-1]
        more = Usage(total.busy_ns - then.busy_ns, total.runs - then.runs, total.yields - then.yields)
        return Had(now_ns - then_ns, on_ns - then_on_ns, more)

    def has_gaps(self) -> bool:
        """Whether most of its runs ended for want of work."""
        usage = self.window().usage
        return usage.runs > 0 and usage.yields > 0.5 * usage.runs
