"""Simulates the kernels of latency-sensitive (LS) requests and of a best-effort (BE) program on one GPU in virtual
time, under any co-location scheme.

BE launches are decided by the same compiled rule as in the shim (native/shim/floor/floor_rule.h). How much concurrent
kernels slow each other down follows from the model in profiles/kernels/contention.py, with the constants of the
software GPU (the imitation of a GPU in softgpu/). Results are deterministic for given arrivals; times are in
nanoseconds.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cotenant.abi.floor import EVENT_INTERVAL_NS, RuleKind, WorkClass
from cotenant.abi.rules import FLOOR_REST_NS, FloorRule, FloorState
from cotenant.native.rules import ended, is_paced, may_go, rested_at_ns, went
from cotenant.policy.colocation import ColocationSettings, Scheme
from cotenant.profiles.kernels.contention import Contention, rates, read_table
from cotenant.profiles.kernels.profile import KernelWork

QUEUE_AHEAD = 64  # a best-effort program keeps this many kernels queued if no rule limits it
EPSILON_NS = 0.5
LS, BE = 0, 1


@dataclass(frozen=True)
class Job:
    """Input of a co-location simulation: the latency-sensitive (LS) kernels of a request, the best-effort (BE) kernels
    of one cycle of the BE program, and arrivals in ns. `sm_count`: SMs of the GPU on which the kernels were measured.
    """

    ls: Sequence[KernelWork]
    be: Sequence[KernelWork]
    arrivals_ns: Sequence[int]
    end_ns: int
    sm_count: int


@dataclass
class ColocationResult:
    """Result of a co-location simulation: the latency of each request (arrival to answer), the time that the completed
    BE kernels take when alone, and the time in which LS work was active.
    """

    latency_ns: list[float] = field(default_factory=list)
    be_work_ns: float = 0.0
    active_ns: float = 0.0
    longest_in_flight_ns: float = 0.0
    end_ns: int = 0


@dataclass(eq=False)
class _Running:
    """A kernel on the GPU, or queued for it."""

    owner: int
    work: KernelWork
    need: float
    left_ns: float
    # The kernel's measured duration alone on the whole GPU, divided by the time that it takes here while no other
    # kernel slows it down. That time can be longer: the program may have fewer SMs, and an event and delays are added.
    alone: float

    def delay(self, by_ns: int) -> None:
        """Extend the run of the kernel on the GPU by `by_ns` nanoseconds."""
        self.alone *= self.left_ns / (self.left_ns + by_ns)
        self.left_ns += by_ns


class ColocationEngine:
    """Simulates one GPU with one latency-sensitive (LS) worker and one best-effort (BE) program. `run` returns a
    ColocationResult.
    """

    def __init__(self, job: Job, scheme: Scheme, settings: ColocationSettings, table: Contention | None = None) -> None:
        self.job, self.scheme = job, scheme
        self.table = table or read_table()
        self.rule = settings.rule()
        self.state = FloorState()
        self.result = ColocationResult(end_ns=job.end_ns)
        self.now = 0.0
        self._caps = (scheme.ls_sms, scheme.be_sms)
        self._queues: tuple[deque[_Running], deque[_Running]] = (deque(), deque())
        self._running: list[_Running] = []  # running kernels, in the order of their starts
        self._speeds: list[float] = []
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0
        self._waiting: deque[int] = deque()  # arrival times of requests that have not been answered
        self._left_in_request = 0
        self._active_since: float | None = None
        # the program (latency-sensitive or best-effort) whose time slice it is, if kernels do not run concurrently
        self._holder = LS
        self._slice_end = 0.0
        self._be_next = 0
        self._be_submitted = 0  # number of BE kernels that were launched and are not in the GPU's queue yet
        self._event_interval_ns = EVENT_INTERVAL_NS if self.scheme.rule is RuleKind.TIDAL else 0
        self._unchecked_ns = 0
        self._look_at = math.inf

    # -- the clock -------------------------------------------------------------------------------------------------

    def run(self) -> ColocationResult:
        """Simulate to the end of the job. Requests that have arrived by then are completed."""
        for at in self.job.arrivals_ns:
            self._at(float(at), self._arrive, at)
        if self.job.be:
            self._at(0.0, self._be_host)
        while self._events or self._running:
            kernel, finish = self._next_end()
            due = self._events[0][0] if self._events else math.inf
            if min(due, finish) > self.job.end_ns and not self._waiting:
                break
            if finish <= due:
                self._advance(finish)
                assert kernel is not None
                self._end(kernel)
            else:
                self._advance(due)
                _, _, call, arguments = heapq.heappop(self._events)
                call(*arguments)
        return self.result

    def _at(self, at: float, call: Callable[..., None], *arguments: Any) -> None:
        self._serial += 1
        heapq.heappush(self._events, (max(at, self.now), self._serial, call, arguments))

    def _next_end(self) -> tuple[_Running | None, float]:
        best: tuple[_Running | None, float] = (None, math.inf)
        for kernel, speed in zip(self._running, self._speeds, strict=True):
            finish = self.now + kernel.left_ns / speed if speed > 0 else math.inf
            if finish < best[1]:
                best = (kernel, finish)
        return best

    def _advance(self, to: float) -> None:
        passed = to - self.now
        for kernel, speed in zip(self._running, self._speeds, strict=True):
            done = min(kernel.left_ns, passed * speed)
            kernel.left_ns -= done
            if kernel.owner == BE and to <= self.job.end_ns:
                self.result.be_work_ns += done * kernel.alone
        self.now = to

    # -- the GPU ---------------------------------------------------------------------------------------------------

    def _submit(self, owner: int, work: KernelWork, event_ns: int = 0) -> None:
        """Queue a kernel. An event may be recorded after the kernel, so that its end is noticed; `event_ns` is the GPU
        time that this event takes, and 0 without an event (see `_event`).
        """
        fill = min(self.table.fill[work.work_class], work.sms / self.job.sm_count)
        need = min(fill, self._caps[owner])
        # A kernel has full speed on the SMs that it would fill, or on the fraction `reach` of the GPU's SMs if that is
        # less. On fewer SMs it takes longer: on half of them twice as long.
        takes_ns = work.duration_ns * max(1.0, min(fill, self.table.reach[work.work_class]) / need) + event_ns
        self._queues[owner].append(_Running(owner, work, need, takes_ns, work.duration_ns / takes_ns))
        self._dispatch()

    def _submit_be(self, work: KernelWork, event_ns: int) -> None:
        self._be_submitted -= 1
        self._submit(BE, work, event_ns)

    def _event(self, work: KernelWork) -> int:
        """Return the GPU time in ns of the event that follows this BE kernel, or 0 if no event follows it. Events
        tell the BE launch rule that kernels have ended. Rule FREE records no events, TIDAL one per EVENT_INTERVAL_NS of
        work, and any other rule one after each kernel.
        """
        if self.scheme.rule is RuleKind.FREE:
            return 0
        self._unchecked_ns += work.duration_ns
        if self._unchecked_ns < self._event_interval_ns:
            return 0
        self._unchecked_ns = 0
        return self.table.event_ns

    def _dispatch(self) -> None:
        """Start the first kernel in the queue of each program (LS and BE). If the programs do not run concurrently,
        start only the first kernel of the program whose time slice it is.
        """
        busy = {kernel.owner for kernel in self._running}
        if self.scheme.together:
            for owner in (LS, BE):
                if owner not in busy and self._queues[owner]:
                    self._running.append(self._queues[owner].popleft())
        elif not self._running:
            other = BE if self._holder == LS else LS
            if self._queues[other] and (not self._queues[self._holder] or self.now >= self._slice_end):
                self._holder = other
                self._slice_end = self.now + self.table.slice_ns
                self._queues[other][0].delay(self.table.switch_ns)
            if self._queues[self._holder]:
                self._running.append(self._queues[self._holder].popleft())
        self._speeds = rates(self.table, [k.need for k in self._running], [k.work.work_class for k in self._running])

    def _end(self, kernel: _Running) -> None:
        self._running.remove(kernel)
        self._dispatch()
        notice = self.now + self.table.notice_ns
        if kernel.owner == BE:
            self._at(notice, self._be_ended, kernel.work)
            return
        self._left_in_request -= 1
        if self.scheme.rule is RuleKind.ORION:
            # the rule of the scheme orion is evaluated again, because the next kernel of the request may have another
            # work class
            self._be_host()
        if self._left_in_request == 0:
            self._at(notice, self._answer)

    # -- LS: one request after the other ---------------------------------------------------------------------------

    def _arrive(self, at: int) -> None:
        self._waiting.append(at)
        if self._active_since is None:
            self._active_since = self.now  # latency-sensitive work is active from this moment on
            self._at(self.now + self.table.launch_ns, self._begin)

    def _begin(self) -> None:
        self._left_in_request = len(self.job.ls)
        for work in self.job.ls:
            self._submit(LS, work)

    def _answer(self) -> None:
        self.result.latency_ns.append(self.now - self._waiting.popleft())
        if self._waiting:
            self._at(self.now + self.table.launch_ns, self._begin)
            return
        assert self._active_since is not None
        self.result.active_ns += self.now - self._active_since
        self._active_since = None  # latency-sensitive work is not active from this moment on
        self._be_host()

    def _ls_class(self) -> WorkClass:
        """Return the work class that the latency-sensitive service reports. The class is NONE while the service has
        no work. While the service is active, rule ORION gets the work class of the kernel that the service runs
        (UNKNOWN between two kernels), and any other rule gets UNKNOWN.
        """
        if self._active_since is None:
            return WorkClass.NONE
        if self.scheme.rule is not RuleKind.ORION:
            return WorkClass.UNKNOWN
        for kernel in self._running:
            if kernel.owner == LS:
                return WorkClass(kernel.work.work_class)
        return WorkClass.UNKNOWN

    # -- BE: launches as the rule allows ---------------------------------------------------------------------------

    def _be_rule(self, work: KernelWork) -> FloorRule:
        if self.scheme.rule is not RuleKind.ORION:
            return self.rule
        return FloorRule(
            scheme=RuleKind.ORION,
            budget_ns=self.rule.budget_ns,
            sm_threshold=self.rule.sm_threshold or self.job.sm_count,
            work_class=work.work_class,
            work_sms=work.sms,
        )

    def _be_host(self) -> None:
        """Simulate the host thread of the BE program: launch while the rule permits it, then set the time at which the
        rule is evaluated again.
        """
        while self.job.be and self.now <= self.job.end_ns:
            work = self.job.be[self._be_next]
            now_ns, active = round(self.now), self._ls_class()
            if self.scheme.rule is RuleKind.FREE:
                if len(self._queues[BE]) + self._be_submitted >= QUEUE_AHEAD:
                    return
            elif not may_go(self._be_rule(work), self.state, active, work.duration_ns, now_ns):
                self._look_again(work, active)
                return
            went(self._be_rule(work), self.state, active, work.duration_ns, now_ns)
            self.state.unfinished += 1
            in_flight = self.state.outstanding_ns
            self.result.longest_in_flight_ns = max(self.result.longest_in_flight_ns, in_flight)
            self._be_next = (self._be_next + 1) % len(self.job.be)
            self._be_submitted += 1
            self._at(self.now + self.table.launch_ns, self._submit_be, work, self._event(work))

    def _look_again(self, work: KernelWork, active: WorkClass) -> None:
        """Set the time at which the rule for BE launches is evaluated again. The rule is also evaluated when a kernel
        or LS work ends, so only a rule that depends on time (tidal) needs a set time.
        """
        if self.scheme.rule is not RuleKind.TIDAL:
            return
        at = float(self.state.busy_until_ns - self.rule.lead_ns)
        if is_paced(self.rule):
            at = max(at, float(rested_at_ns(self.state)) if self.state.owed_ns >= FLOOR_REST_NS else at)
        if active:
            missing = min(work.duration_ns, self.rule.budget_ns) - self.state.credit_ns
            if not self.rule.overlap_permille or self.state.outstanding_ns:
                return
            at = self.now + max(1.0, math.ceil(missing * 1000 / self.rule.overlap_permille))
        if at > self.now + EPSILON_NS and not self.now < self._look_at <= at:
            self._look_at = at
            self._at(at, self._be_host)

    def _be_ended(self, work: KernelWork) -> None:
        ended(self.state, work.duration_ns, round(self.now))
        self._be_host()


def alone(job: Job, scheme: Scheme, settings: ColocationSettings) -> ColocationResult:
    """Simulate the LS requests of a job on all SMs and without its BE program, for comparison with `job` itself."""
    from dataclasses import replace

    return ColocationEngine(replace(job, be=()), replace(scheme, ls_sms=1.0, be_sms=1.0, together=True), settings).run()
