"""One tenant of a GPU under hardware time slices: its share, its time slice, and its measured usage. A *run* is a time
in which the GPU runs the tenant without a switch to another one. Times are in nanoseconds.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from cotenant.policy.shares.account import Share
from cotenant.policy.shares.slice_settings import SliceSettings


class Usage(NamedTuple):
    """A tenant's usage of the GPU since it joined: GPU time, number of runs, and how many runs ended because the tenant
    had no more work queued, not because its time slice ended.
    """

    busy_ns: int = 0
    runs: int = 0
    yields: int = 0


# A tenant is stopped for a part of each period when it owes this fraction of a window. While tenants share the GPU,
# their slices or turns keep them near their limits, and each stop would cost a part of a share.
UNSTOPPED = 0.0075
IDLE_STEPS = 2  # a tenant is idle after this many correction steps in which it used no GPU time


class Had(NamedTuple):
    """A tenant's usage of the GPU in an interval: the length of the interval, the part of it in which the tenant's
    channels were enabled, and the usage of the GPU in it.
    """

    span_ns: int = 0
    on_ns: int = 0
    usage: Usage = Usage()

    @property
    def part(self) -> float:
        """Return the fraction of the interval for which the tenant used the GPU."""
        return self.usage.busy_ns / self.span_ns if self.span_ns else 0.0

    @property
    def density(self) -> float:
        """Return the fraction of the time with enabled channels for which the tenant used the GPU."""
        return self.usage.busy_ns / self.on_ns if self.on_ns else 0.0


@dataclass(eq=False)
class SliceTenant:
    """One tenant on one GPU under hardware time slices, with its share and its measured usage."""

    name: str
    share: Share
    work_class: str
    groups: int = 0  # number of the tenant's compute channel groups on this GPU
    slice_us: int = 0  # the time slice that was set for the tenant, in us; 0: none was set yet
    on: bool = True
    # factor on the tenant's time slice, by which measured deviations from its share are corrected
    correction: float = 1.0
    duty: float = 1.0  # fraction of each period, or of its turn in the timetable, in which the tenant may run
    # fraction of its turns (time in which only it may run) that the tenant uses while it does not pause
    density: float = 1.0
    brief: bool = False  # whether the tenant has only a little work in flight while a latency-sensitive tenant works
    # whether the tenant's queue ran empty too often, so that time slices alone did not give it its share
    needs_turns: bool = False
    idle_steps: int = 0  # number of successive correction steps in which the tenant used no GPU time
    debt_ns: float = 0.0  # GPU time above its limit that the tenant still owes
    total: Usage = field(default_factory=Usage)
    # measurements at earlier correction steps: (time, sum of the time with enabled channels, sum of the usage)
    history: deque[tuple[int, int, Usage]] = field(default_factory=deque)
    _on_ns: int = 0
    _since_ns: int = 0

    @property
    def competes(self) -> bool:
        """Whether the tenant has work, as far as known: it used the GPU recently, or has just joined."""
        return self.groups > 0 and self.idle_steps < IDLE_STEPS

    def put(self, on: bool, now_ns: int) -> None:
        """Record that the tenant's channels are enabled, or disabled, from now on."""
        if self.on:
            self._on_ns += now_ns - self._since_ns
        self.on, self._since_ns = on, now_ns

    def wake(self) -> None:
        """Record that the idle tenant works again, and discard measurements from before: it used nothing meanwhile."""
        self.idle_steps = 0
        self.history.clear()

    def forget(self, now_ns: int) -> None:
        """Discard the tenant's past measurements; the caller then calls `begin` with the usage so far."""
        self.history.clear()
        if self.total == Usage():
            self.begin(Usage(), now_ns)

    def begin(self, total: Usage, now_ns: int) -> None:
        """Start to measure the tenant's usage of the GPU, unless measuring has begun. `total`: its usage so far."""
        self.put(self.on, now_ns)
        if not self.history:
            self.history.append((now_ns, self._on_ns, total))

    def had(self, now_ns: int, total: Usage, window_ns: int) -> Had:
        """Record `total`, the tenant's usage since it joined, and return its usage since the previous call."""
        self.put(self.on, now_ns)
        self.total = total
        self.history.append((now_ns, self._on_ns, total))
        while len(self.history) > 2 and self.history[1][0] <= now_ns - window_ns:
            self.history.popleft()
        return self._since(-2) if len(self.history) > 1 else Had()

    def exceeds(self, total: Usage, span_ns: int) -> bool:
        """Whether the tenant is never stopped, and has used more since the previous step than its limit allows in
        `span_ns`. `total`: its usage since it joined."""
        allowed_ns = self.share.limit * span_ns
        return self.share.limit < 1.0 <= self.duty and total.busy_ns - self.total.busy_ns > allowed_ns

    def correct_limit(self, step: Had, whole: float, shared: bool, settings: SliceSettings) -> None:
        """Correct `duty` of a tenant with a limit: (limit - correction) / (density * whole). The correction is for GPU
        time above the limit; density: fraction of the enabled time that is used. `whole`: the fraction of a period in
        which the tenant may run with a duty of 1, which is less than 1 if it has turns. `shared`: whether others
        compete for the GPU; a tenant alone is stopped even if it used little lately."""
        limit = self.share.limit
        if limit >= 1.0:
            return
        debt_ns = self.debt_ns + step.usage.busy_ns - limit * step.span_ns
        self.debt_ns = max(-0.05 * settings.period_ns, min(debt_ns, settings.window_ns / 2))
        if not step.usage.busy_ns:
            # a pause says nothing about how the tenant uses the time in which it may run; but perhaps the slices of
            # others take up all of that time
            self.duty = 1.0 if shared else self.duty
            return
        # in the last step, another tenant may have stopped working
        density = max(self._since(max(-4, -len(self.history))).density, step.density)
        if shared and self.duty >= 1.0 and self.debt_ns < UNSTOPPED * settings.window_ns:
            return
        # a tenant alone that did not work in each of the last three steps has begun to work in one of them, so what it
        # used of them says too little
        busy = [total.busy_ns for _, _, total in self.history][-4:]
        if not shared and (len(busy) < 4 or not all(before < then for before, then in itertools.pairwise(busy))):
            density = 1.0
        used = max(0.01, min(1.0, density) * whole)
        wanted = (limit - self.debt_ns / (settings.window_ns / 4)) / used
        self.duty = max(limit / 4, min(wanted, 1.0))

    def measure_density(self, since_ns: int, span_ns: int) -> None:
        """Measure `density` from the correction steps since `since_ns`, if they are `span_ns` together. The step with
        the largest density counts, because the tenant may have had no work in others."""
        steps = [step for step in self.history if step[0] >= since_ns]
        if len(steps) < 2 or steps[-1][0] - steps[0][0] < span_ns:
            return
        pairs = itertools.pairwise(steps)
        largest = max((had.busy_ns - before.busy_ns) / max(1, on - was) for (_, was, before), (_, on, had) in pairs)
        density = max(0.25, min(1.0, largest))
        if abs(density - self.density) > 0.02:
            self.density = density

    def window(self) -> Had:
        """Return the tenant's usage in the last window, or since measuring began if that is less than a window ago."""
        return self._since(0) if self.history else Had()

    def since(self, then_ns: int) -> Had:
        """Return the tenant's usage since the first measurement at `then_ns` or later that is still kept. Measurements
        from before the last window are discarded, so an earlier `then_ns` gives the usage in the window.
        """
        index = next((i for i, (at_ns, *_) in enumerate(self.history) if at_ns >= then_ns), len(self.history))
        return self._since(index) if index < len(self.history) else Had()

    def _since(self, index: int) -> Had:
        (then_ns, then_on_ns, then), (now_ns, on_ns, total) = self.history[index], self.history[-1]
        more = Usage(total.busy_ns - then.busy_ns, total.runs - then.runs, total.yields - then.yields)
        return Had(now_ns - then_ns, on_ns - then_on_ns, more)

    def has_gaps(self) -> bool:
        """Whether most of the tenant's runs ended because it had no more work queued."""
        usage = self.window().usage
        return usage.runs > 0 and usage.yields > 0.5 * usage.runs
