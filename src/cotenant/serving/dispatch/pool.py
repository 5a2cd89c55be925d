"""The live state of a server: a plan, its dispatcher, and a worker for every gpulet. No networking.

Everything runs in one event loop, so there are no locks. The dispatcher decides; this module holds what the dispatcher
does not know: the requests themselves, the workers, failures of workers, and the switch from one plan to the next.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence

from cotenant.core.serving import Gpulet, Service, ServingPlan
from cotenant.policy.serving.dispatch import Dispatcher, Drop, Instruction, Start
from cotenant.profiles.serving.latency import ServingProfile
from cotenant.serving.dispatch.calls import Call, Kind, Outcome, Refusal, Unit
from cotenant.serving.dispatch.lets import Let, Loaded
from cotenant.serving.dispatch.stats import Stats
from cotenant.serving.protocol.tensors import Tensor
from cotenant.serving.worker import Job, Result, Worker

TICK_S = 0.02
HUNG_FACTOR, HUNG_SLOS, HUNG_LEAST_MS = 10.0, 2.0, 1000.0
# time limit of a best-effort batch; it is long, because the batch may have to wait for latency-sensitive work
HUNG_BEST_EFFORT_MS = 60_000.0
# The dispatcher gets a deadline that is earlier than the request's, because batches may take longer than planned. It is
# earlier by at most this fraction of the time from the request's arrival until its deadline.
MOST_SPARE = 0.1
# The overrun is how much longer than planned a batch takes. In the running average of a service's overrun, a new value
# has the weight OVERRUN_UP if it is above the average, and OVERRUN_DOWN if it is below.
OVERRUN_UP, OVERRUN_DOWN = 0.25, 0.02


class Pool:
    """The live state of a server, as described at the top of the module. `lost` is called with a gpulet whose worker
    has ended, and the reason."""

    def __init__(
        self, services: Sequence[Service], profiles: Mapping[str, ServingProfile], stats: Stats,
        lost: Callable[[Let, str], None], hold: float = 0.0,
    ) -> None:  # fmt: skip
        self.services = list(services)
        self.service = {s.name: s for s in services}
        self.profiles, self.stats, self.lost, self.hold = profiles, stats, lost, hold
        self.loaded: dict[str, Loaded] = {}
        self.lets: list[Let] = []
        self.leaving: set[Let] = set()
        self._of: dict[Worker, Let] = {}
        self._placed: set[str] = set()
        self._early: set[Worker] = set()
        self._waiting: dict[str, dict[int, Unit]] = {s.name: {} for s in services}
        self.in_flight = dict.fromkeys(self.service, 0)
        self._overrun_ms = dict.fromkeys(self.service, 0.0)
        self._began = time.monotonic()
        self._numbers = 0
        self._ticked_ms = 0.0
        self.plan = ServingPlan("none", 0, ())
        self.desk = Dispatcher(self.plan, self.services, profiles, hold)
        self._wake: asyncio.TimerHandle | None = None
        self._wake_at = math.inf

    def now_ms(self) -> float:
        """Milliseconds since the server started."""
        return (time.monotonic() - self._began) * 1e3

    # ---- requests ----

    def serves(self, service: str) -> bool:
        """Whether the current plan serves a service."""
        return service in self._placed

    def offer(self, call: Call, tensors: list[Tensor], row: int, deadline_ms: float | None) -> None:
        """Put an item of a call into the queue of its service; `deadline_ms` from now, None: the service's SLO."""
        name = call.service
        now = self.now_ms()
        service = self.service[name]
        if deadline_ms is None:
            deadline = now + service.slo_ms if service.latency_sensitive else math.inf
        else:
            deadline = now + deadline_ms
        unit = Unit(call, row, tensors, now, deadline)
        self.in_flight[name] += 1
        # batches take longer than in the profile by the average overrun, so the dispatcher gets a deadline that is
        # earlier by it
        spare = min(self._overrun_ms[name], MOST_SPARE * (deadline - now))
        number, instructions = self.desk.request(name, now, deadline - spare)
        if number < 0:
            self._refuse(unit, Outcome.FULL, now)
            return
        self._waiting[name][number] = unit
        if instructions:
            self._carry_out(instructions, now)
        elif self.hold:
            self._arm()

    def _carry_out(self, instructions: Sequence[Instruction], now: float) -> None:
        for instruction in instructions:
            if isinstance(instruction, Start):
                self._begin(instruction, now)
            else:
                assert isinstance(instruction, Drop)
                self._refuse(self._waiting[instruction.service].pop(instruction.request), Outcome.DROPPED, now)
        if self.hold:
            self._arm()

    def _begin(self, start: Start, now: float) -> None:
        let = self.lets[start.gpulet]
        waiting = self._waiting[start.service]
        units = [waiting.pop(number) for number in start.requests]
        if any(unit.alone for unit in units):
            # an item marked `alone` may have killed a worker, so it runs alone, and no other item can fail together
            # with it
            together = [unit for unit in units if not unit.alone]
            let.parts.extend([together] if together else [])
            let.parts.extend([unit] for unit in units if unit.alone)
            units = let.parts.popleft()
        self._run(let, start.service, units, start.expected_ms, now)

    def _run(self, let: Let, service: str, units: list[Unit], expected_ms: float, now: float) -> None:
        self._numbers += 1
        job = Job(self._numbers, service, [unit.tensors for unit in units], expected_ms)
        let.job, let.running, let.started_ms = job, units, now
        known = self.service[service]
        least_ms = HUNG_LEAST_MS if known.latency_sensitive else HUNG_BEST_EFFORT_MS
        let.hung_ms = now + max(HUNG_FACTOR * expected_ms, HUNG_SLOS * known.slo_ms, least_ms)
        let.free.clear()
        assert let.worker is not None
        let.worker.submit(job)

    def finished(self, worker: Worker, job: Job, result: Result) -> None:
        """See WorkerListener."""
        let = self._of.get(worker)
        if let is None or let.job is not job:
            return
        now = self.now_ms()
        units, started = let.running, let.started_ms
        over = max(0.0, now - started - job.expected_ms) - self._overrun_ms[job.service]
        self._overrun_ms[job.service] += over * (OVERRUN_UP if over > 0 else OVERRUN_DOWN)
        let.job, let.running, let.hung_ms = None, [], math.inf
        let.busy_ms += now - started
        if let.parts:
            self._run(let, job.service, let.parts.popleft(), job.expected_ms, now)
        else:
            self._freed(let, now)
        name = let.spec.name
        executed = result.executed_ms
        given = max(0.0, job.submitted_s * 1e3 - self._began * 1e3 - started) if job.submitted_s else 0.0
        parts = (given, executed, max(0.0, now - started - given - executed))
        self.stats.batch(job.service, len(units), parts)
        requests = self.stats.services[job.service].requests
        for unit, answer in zip(units, result.answers, strict=True):
            if isinstance(answer, str):
                self._fail(unit, answer, now, name, len(units), executed)
                continue
            self.in_flight[job.service] -= 1
            outcome = Outcome.OK if now <= unit.deadline_ms + 1e-9 else Outcome.LATE
            queued = started - unit.arrived_ms
            self.stats.unit(
                job.service, unit.arrived_ms, queued, len(units), name, executed, outcome,
                now - unit.arrived_ms,
            )  # fmt: skip
            call = unit.call
            if call.left == 1 and not call.done:
                requests.answered(now - unit.arrived_ms, queued, parts)
            call.answered(unit.row, answer, queued, executed, len(units))

    def _freed(self, let: Let, now: float) -> None:
        let.free.set()
        if let.index >= 0:
            self._carry_out(self.desk.done(let.index, now), now)

    def _refuse(self, unit: Unit, outcome: Outcome, now: float) -> None:
        service = unit.call.service
        self.in_flight[service] -= 1
        waited = now - unit.arrived_ms
        self.stats.unit(service, unit.arrived_ms, waited, 0, "", 0.0, outcome, waited)
        self._failed(unit, waited)
        retry = self.retry_s(service)
        if outcome is Outcome.FULL:
            unit.call.refused(Refusal(Kind.FULL, f"the queue of {service} is full", retry))
        elif outcome is Outcome.CANCELLED:
            unit.call.refused(Refusal(Kind.CANCELLED, "the client has disconnected"))
        else:
            why = f"dropped: {service} could not answer within {unit.deadline_ms - unit.arrived_ms:.4g} ms"
            unit.call.refused(Refusal(Kind.LATE, why, retry))

    def withdraw(self, call: Call) -> None:
        """Remove from the queue the items of a call whose client has disconnected. Items that are in a batch already
        are not removed.
        """
        if call.done:
            return
        waiting = self._waiting[call.service]
        numbers = [number for number, unit in waiting.items() if unit.call is call]
        now = self.now_ms()
        for number in numbers:
            self.desk.withdraw(call.service, number)
            self._refuse(waiting.pop(number), Outcome.CANCELLED, now)

    def _fail(
        self, unit: Unit, why: str, now: float, gpulet: str = "", batch: int = 0, executed_ms: float = 0.0
    ) -> None:
        service = unit.call.service
        self.in_flight[service] -= 1
        took = now - unit.arrived_ms
        self.stats.unit(service, unit.arrived_ms, took - executed_ms, batch, gpulet, executed_ms, Outcome.FAILED, took)
        self._failed(unit, took)
        unit.call.refused(Refusal(Kind.FAILED, why))

    def _failed(self, unit: Unit, took_ms: float) -> None:
        if not unit.call.done:
            self.stats.services[unit.call.service].requests.times["fail"].add(took_ms)

    def retry_s(self, service: str) -> float:
        """Estimate the seconds until the requests that wait now will have been served, from the capacity of the plan.
        """
        capacity = sum(
            let.spec.capacity_rps(seat) for let in self.lets for seat in let.spec.seats if seat.service == service
        )
        return self.desk.waiting(service) / capacity if capacity > 0 else 1.0

    def waiting(self, service: str) -> int:
        """Number of requests that wait in the queue of a service."""
        return len(self._waiting[service])

    # ---- time ----

    def tick(self) -> None:
        """Handle deadlines that pass in a queue, and hung workers. Called every TICK_S."""
        now = self.now_ms()
        late = now - self._ticked_ms - 2e3 * TICK_S
        self._ticked_ms = now
        drops = self.desk.expire(now)
        if drops:
            self._carry_out(drops, now)
        for let in [*self.lets, *self.leaving]:
            if late > 0:
                # this event loop itself was delayed, so the worker may have answered without the loop having noticed
                let.hung_ms += late
            if now > let.hung_ms and let.worker is not None:
                worker = let.worker
                self.died(worker, f"hung for {now - let.started_ms:.0f} ms on a batch of {len(let.running)}")
                worker.kill()

    def _arm(self) -> None:
        """Set the timer that wakes the dispatcher when the next held batch must be sent."""
        at = self.desk.next_wake_ms
        if at == self._wake_at:
            return
        if self._wake is not None:
            self._wake.cancel()
        self._wake_at = at
        loop = asyncio.get_running_loop()
        self._wake = loop.call_later(max(0.0, at - self.now_ms()) / 1e3, self._woken) if at < math.inf else None

    def _woken(self) -> None:
        self._wake, self._wake_at = None, math.inf
        now = self.now_ms()
        self._carry_out(self.desk.wake(now), now)
        self._arm()

    # ---- workers ----

    def died(self, worker: Worker, why: str) -> None:
        """Handle the death of a worker. Its items go back into the queue; those that it was running are tried once
        more, each alone.
        """
        let = self._of.pop(worker, None)
        if let is None:
            self._early.add(worker)  # the worker has been started, but is not attached to a gpulet yet
            return
        now = self.now_ms()
        let.worker, let.job, let.hung_ms = None, None, math.inf
        suspects, let.running = let.running, []
        rest = [unit for part in let.parts for unit in part]
        let.parts.clear()
        let.free.set()
        if let.index >= 0:
            self.desk.hold(let.index)
        self.stats.worker_deaths += 1
        for unit in suspects:
            if unit.tries:
                text = (
                    "two workers failed while they ran this request, so the request is not tried again; the second "
                    f"worker {why}"
                )
                self._fail(unit, text, now, let.spec.name)
            else:
                unit.tries, unit.alone = 1, True
                self._again(unit, now)
        for unit in rest:
            self._again(unit, now)
        self.lost(let, why)

    def _again(self, unit: Unit, now: float) -> None:
        service = unit.call.service
        number, instructions = self.desk.request(service, now, unit.deadline_ms)
        if number < 0:
            self._refuse(unit, Outcome.FULL, now)
            return
        self._waiting[service][number] = unit
        self._carry_out(instructions, now)

    def attach(self, let: Let, worker: Worker) -> None:
        """Attach a ready worker to a gpulet."""
        if worker in self._early:
            self._stillborn(let, worker)
            return
        let.worker = worker
        self._of[worker] = let
        now = self.now_ms()
        if let.index >= 0:
            self._carry_out(self.desk.done(let.index, now), now)

    def adjust(self, plan: ServingPlan) -> bool:
        """Apply a plan that differs from the current one only in rates and duty cycles. Returns False, and does
        nothing, if the plan differs in more."""
        if [_what(x) for x in plan.gpulets] != [_what(x) for x in self.plan.gpulets]:
            return False
        self.plan = plan
        for let, spec in zip(self.lets, plan.gpulets, strict=True):
            let.spec = spec
        return True

    def switch(self, plan: ServingPlan, lets: Sequence[Let], desk: Dispatcher | None = None) -> list[Let]:
        """Apply a plan. `lets` has an entry with a ready worker for each gpulet of the plan. Waiting requests keep
        their order and deadlines. Returns the old gpulets that are no longer needed; they may still run a batch.
        `desk`: the plan's dispatcher, if already constructed.
        """
        now = self.now_ms()
        old, waiting = self.lets, self._waiting
        keep = set(lets)
        gone = [let for let in old if let not in keep]
        for let in gone:
            let.index = -1
        self.desk = desk or Dispatcher(plan, self.services, self.profiles, self.hold)
        self.plan, self.lets = plan, list(lets)
        self._placed = {seat.service for let in plan.gpulets for seat in let.seats}
        self._waiting = {name: {} for name in waiting}
        for i, let in enumerate(self.lets):
            let.index, let.spec = i, plan.gpulets[i]
            if let.worker is not None:
                self._of[let.worker] = let
            self.desk.hold(i)
        for name, units in waiting.items():
            for unit in units.values():
                number = self.desk.queue(name, unit.arrived_ms, unit.deadline_ms)
                if number < 0:
                    self._refuse(unit, Outcome.FULL, now)
                else:
                    self._waiting[name][number] = unit
        for i, let in enumerate(self.lets):
            if let.worker in self._early:
                self._stillborn(let, let.worker)
            elif let.job is None and let.worker is not None:
                let.free.set()
                self._carry_out(self.desk.done(i, now), now)
        self.leaving.update(gone)
        return gone

    def _stillborn(self, let: Let, worker: Worker | None) -> None:
        """Handle the death of a worker that has started but has not been attached to a gpulet yet."""
        assert worker is not None
        self._early.discard(worker)
        self._of.pop(worker, None)
        let.worker = None
        self.lost(let, "ended before its first batch")

    async def drained(self, let: Let) -> None:
        """Wait until a gpulet that was removed from the plan runs nothing."""
        await let.free.wait()
        self.leaving.discard(let)
        if let.worker is not None:
            self._of.pop(let.worker, None)

    def abandon(self, why: str) -> None:
        """Refuse all waiting requests, because the server ends or a service was removed."""
        for name in self._waiting:
            self.abandon_service(name, why)

    def abandon_service(self, name: str, why: str) -> None:
        """Refuse the waiting requests of a service that will not be served any more."""
        units, self._waiting[name] = list(self._waiting[name].values()), {}
        self.desk.clear(name)
        now = self.now_ms()
        for unit in units:
            self.in_flight[name] -= 1
            took = now - unit.arrived_ms
            self.stats.unit(name, unit.arrived_ms, took, 0, "", 0.0, Outcome.DROPPED, took)
            self._failed(unit, took)
            unit.call.refused(Refusal(Kind.UNAVAILABLE, why, 1.0))


def _what(let: Gpulet) -> tuple[object, ...]:
    """Return the properties of a gpulet that the dispatcher and the workers use: all except its rates and duty
    cycle.
    """
    return let.gpu, let.partition, let.slot, [(seat.service, seat.batch) for seat in let.seats]
