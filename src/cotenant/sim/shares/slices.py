"""Simulates a GPU with hardware time slices between channel groups, which the agent's policy controls.

A group with work runs for its slice, and kernels are preempted at its end. Each change of groups takes the time of a
switch; groups without work are skipped. Instructions of the policy take effect with the delays of a real GPU. Each
tenant is one group. Deterministic; times are in nanoseconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from cotenant.policy.shares import Share
from cotenant.policy.shares.slice_instructions import SetSlice, SliceInstruction, Stop
from cotenant.policy.shares.slice_settings import SliceSettings
from cotenant.policy.shares.slice_tenant import Usage
from cotenant.policy.shares.slices import GpuSlices
from cotenant.sim.shares.engine import Load

NEVER_NS = 2**63
DRIVER_SLICE_NS = 2_048_000  # the time slice that the driver gives a new group


@dataclass(frozen=True)
class Hardware:
    """Properties of the hardware that switches between channel groups, by default those of an H100
    (docs/decisions/0125). `bias_ns`: how much longer than its slice a group runs.
    """

    switch_ns: int = 220_000
    bias_ns: int = 0
    longest_ns: int = 100_000_000
    set_ns: int = 340_000
    stop_ns: int = 440_000  # time from the instruction to stop a channel group until none of its kernels runs any more
    go_ns: int = 350_000


@dataclass(eq=False)
class _Group:
    load: Load
    work_class: str
    slice_ns: int = DRIVER_SLICE_NS
    enabled: bool = True
    left_ns: int = 0  # remaining GPU time of the group's current work; NEVER_NS: endless
    came_ns: int = 0  # time at which the tenant's current work arrived
    alive: bool = False
    busy_ns: int = 0
    runs: int = 0
    yields: int = 0

    @property
    def runnable(self) -> bool:
        return self.alive and self.enabled and self.left_ns > 0


@dataclass
class SliceResult:
    """The result of a simulated run. `spans`: (tenant, start_ns, end_ns) of GPU work; `bursts`: (tenant, came_ns,
    end_ns) of work that has ended.
    """

    spans: list[tuple[str, int, int]] = field(default_factory=list)
    bursts: list[tuple[str, int, int]] = field(default_factory=list)
    orders: list[tuple[int, SliceInstruction]] = field(default_factory=list)
    switches: int = 0
    end_ns: int = 0

    def worked_ns(self, tenant: str, start_ns: int, end_ns: int) -> int:
        """Return the GPU time of a tenant within [start, end)."""
        return sum(max(0, min(e, end_ns) - max(b, start_ns)) for name, b, e in self.spans if name == tenant)

    def windows(self, tenant: str, window_ns: int, start_ns: int = 0, step_ns: int = 100_000_000) -> list[float]:
        """Return the tenant's fraction of the GPU time in each of several windows of `window_ns`. The first begins at
        `start_ns`, and each next one `step_ns` later, up to the last one that ends within the run.
        """
        found = []
        while start_ns + window_ns <= self.end_ns:
            found.append(self.worked_ns(tenant, start_ns, start_ns + window_ns) / window_ns)
            start_ns += step_ns
        return found


class SliceEngine:
    """Simulates tenants under the policy GpuSlices. `classes` maps a tenant's name to its work class; a tenant that is
    not in it has the work class "normal".
    """

    def __init__(
        self,
        loads: Iterable[Load],
        settings: SliceSettings | None = None,
        hardware: Hardware | None = None,
        classes: dict[str, str] | None = None,
    ) -> None:
        self.policy = GpuSlices("0", settings)
        self.hardware = hardware or Hardware()
        self.result = SliceResult()
        self.now_ns = 0
        self._groups = {load.name: _Group(load, (classes or {}).get(load.name, "normal")) for load in loads}
        self._order = list(self._groups.values())
        self._current: _Group | None = None
        self._switched_ns = 0  # time at which the present switch between groups ends
        self._slice_end_ns = 0
        self._span_ns: int | None = None  # time at which the current group began to run; None: no group runs
        self._queue: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0
        self._wake_ns = NEVER_NS
        self._obeyed_ns = 0  # time at which the last instruction takes effect
        for group in self._order:
            self._at(group.load.start_ns, self._come, group)
            if group.load.stop_ns is not None:
                self._at(group.load.stop_ns, self._die, group)
        self._at(self.policy.settings.poll_ns, self._poll)

    def run(self, until_ns: int) -> SliceResult:
        """Simulate until the time `until_ns`. It may be called again to continue."""
        while self.now_ns < until_ns:
            at_ns = min(self._queue[0][0] if self._queue else NEVER_NS, until_ns)
            self._work(at_ns)
            while self._queue and self._queue[0][0] <= self.now_ns:
                _, _, call, arguments = heapq.heappop(self._queue)
                call(*arguments)
        self._end_span()
        self.result.end_ns = until_ns
        return self.result

    def change(self, at_ns: int, name: str, share: Share) -> None:
        """Change a tenant's share at a given time, as `cotenant set` does."""
        self._at(at_ns, self._join, self._groups[name], share)

    # -- the hardware ----------------------------------------------------------------------------------------------

    def _work(self, until_ns: int) -> None:
        """Let the current group work. Stops when its work ends, because that may cause an event."""
        while self.now_ns < until_ns:
            if self._switched_ns > self.now_ns:
                self.now_ns = min(until_ns, self._switched_ns)
                if self.now_ns < self._switched_ns:
                    return
            runnable = [group for group in self._order if group.runnable]
            if not self._choose(runnable):
                continue
            current = self._current
            if current is None or not current.runnable:
                self.now_ns = until_ns
                return
            if self._span_ns is None:
                self._span_ns = self.now_ns
            end_ns = min(until_ns, self.now_ns + current.left_ns)
            if len(runnable) > 1:
                end_ns = min(end_ns, self._slice_end_ns)
            elif self.now_ns >= self._slice_end_ns:  # no other tenant has work, so the current group gets another slice
                length_ns = self._run_ns(current)
                self._slice_end_ns += -(-(self.now_ns + 1 - self._slice_end_ns) // length_ns) * length_ns
            used_ns = end_ns - self.now_ns
            current.busy_ns += used_ns
            if current.left_ns != NEVER_NS:
                current.left_ns -= used_ns
            self.now_ns = end_ns
            if current.left_ns == 0:
                self._end_span()
                self.result.bursts.append((current.load.name, current.came_ns, end_ns))
                self._at(end_ns + max(1, current.load.pause_ns), self._burst, current)
                return

    def _choose(self, runnable: list[_Group]) -> bool:
        """Choose the group to run when the slice or the group's work has ended. Returns False if a switch begins."""
        current = self._current
        over = self.now_ns >= self._slice_end_ns and len(runnable) > 1
        if current is not None and current.runnable and not over:
            return True
        self._end_span()
        at = -1 if current is None else self._order.index(current)
        chosen = next((g for g in (*self._order[at + 1 :], *self._order[: at + 1]) if g.runnable), None)
        if chosen is None:
            return True
        if current is not None and not current.runnable and chosen is not current:
            current.yields += 1
        self._slice_end_ns = self.now_ns + self._run_ns(chosen)
        if chosen is current:
            return True
        chosen.runs += 1
        self._current = chosen
        self.result.switches += 1
        self._switched_ns = self.now_ns + self.hardware.switch_ns
        self._slice_end_ns += self.hardware.switch_ns
        return False

    def _run_ns(self, group: _Group) -> int:
        slice_ns = min(group.slice_ns, self.hardware.longest_ns)
        return max(1000, slice_ns + self.hardware.bias_ns)

    def _end_span(self) -> None:
        if self._current is not None and self._span_ns is not None and self.now_ns > self._span_ns:
            self.result.spans.append((self._current.load.name, self._span_ns, self.now_ns))
        self._span_ns = None

    # -- tenants and the agent -------------------------------------------------------------------------------------

    def _at(self, at_ns: int, call: Callable[..., None], *arguments: Any) -> None:
        self._serial += 1
        heapq.heappush(self._queue, (at_ns, self._serial, call, arguments))

    def _come(self, group: _Group) -> None:
        group.alive = True
        self._join(group, group.load.share)
        self._obey(self.policy.groups(group.load.name, 1, self.now_ns))
        self._burst(group)

    def _join(self, group: _Group, share: Share) -> None:
        self._obey(self.policy.join(group.load.name, share, group.work_class, self.now_ns))

    def _burst(self, group: _Group) -> None:
        if group.alive:
            group.left_ns = NEVER_NS if group.load.busy_ns is None else group.load.busy_ns
            group.came_ns = self.now_ns

    def _die(self, group: _Group) -> None:
        if group is self._current:
            self._end_span()
        group.alive, group.left_ns = False, 0
        self._obey(self.policy.leave(group.load.name, self.now_ns))

    def _poll(self) -> None:
        usage = {name: Usage(g.busy_ns, g.runs, g.yields) for name, g in self._groups.items() if g.alive}
        self._obey(self.policy.used(usage, self.now_ns))
        self._at(self.now_ns + self.policy.settings.poll_ns, self._poll)

    def _advance(self, at_ns: int) -> None:
        if at_ns == self._wake_ns:
            self._wake_ns = NEVER_NS
            self._obey(self.policy.advance(self.now_ns))

    def _obey(self, instructions: list[SliceInstruction]) -> None:
        cost = self.hardware
        for step in instructions:
            self.result.orders.append((self.now_ns, step))
            if isinstance(step, SetSlice):
                took_ns = cost.set_ns
            else:
                took_ns = cost.stop_ns if isinstance(step, Stop) else cost.go_ns
            # the agent gives one instruction after the other, so a later one never takes effect first
            self._obeyed_ns = max(self._obeyed_ns, self.now_ns) + took_ns
            self._at(self._obeyed_ns, self._carry_out, step)
        wake_ns = self.policy.wake_ns(self.now_ns)
        if wake_ns is not None and wake_ns != self._wake_ns:
            self._wake_ns = wake_ns
            self._at(wake_ns, self._advance, wake_ns)

    def _carry_out(self, step: SliceInstruction) -> None:
        group = self._groups[step.tenant]
        if isinstance(step, SetSlice):
            group.slice_ns = step.slice_us * 1000
            if group is self._current:
                self._slice_end_ns = min(self._slice_end_ns, self.now_ns + self._run_ns(group))
        else:
            if group is self._current and isinstance(step, Stop):
                self._end_span()
            group.enabled = not isinstance(step, Stop)
