"""The dispatcher of requests: its input is requests and finished batches, its output instructions. It has no clock and
does no input or output.

A *gpulet* is a part of a GPU on which one or more services run batches in turn; a *seat* is the place of one service on
a gpulet. The same compiled core (dispatch_kernel) runs in the simulator's loop and behind this object in a server.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cotenant.core.errors import InputError
from cotenant.core.serving import Gpulet, Seat, Service, ServingPlan
from cotenant.policy.serving import dispatch_kernel as kernel
from cotenant.policy.serving.packing.check import neighbours, planned_pressure
from cotenant.profiles.serving.latency import ModelProfile, Partition, ServingProfile

MAX_RING = 1 << 20


@dataclass(frozen=True)
class Start:
    """An instruction to run these requests of a service as one batch on a gpulet (a part of a GPU). The batch is
    predicted to take `expected_ms`.
    """

    gpulet: int
    service: str
    requests: tuple[int, ...]
    expected_ms: float


@dataclass(frozen=True)
class Drop:
    """An instruction to answer a request as dropped. `reason`: late (it could not be answered in time) or full (its
    queue was full).
    """

    service: str
    request: int
    reason: str


Instruction = Start | Drop


def build_desk(
    plan: ServingPlan, services: Sequence[Service], profiles: Mapping[str, ServingProfile], hold: float = 0.0
) -> kernel.Desk:
    """Create the compiled dispatcher's state for a serving plan. `profiles`: by GPU model. `hold`: for how long an
    incomplete batch is held back after its first request has arrived, as a fraction of the gpulet's cycle (the planned
    time in which each of its services runs one batch); 0: an idle gpulet starts a batch at once.
    """
    index = {s.name: i for i, s in enumerate(services)}
    pairs = [(i, let, seat) for i, let in enumerate(plan.gpulets) for seat in let.seats]
    unknown = next((seat.service for _, _, seat in pairs if seat.service not in index), None)
    if unknown is not None:
        raise InputError(f"the plan serves {unknown!r}, which is not among the services", field="plan")
    for let in plan.gpulets:
        if let.gpu_model not in profiles:
            known = ", ".join(profiles)
            raise InputError(
                f"the plan uses a {let.gpu_model}, for which there is no profile, only for {known}", field="plan"
            )
    top = max((seat.batch for _, _, seat in pairs), default=1)
    seats, lets = np.zeros(len(pairs), kernel.SEAT), np.zeros(len(plan.gpulets), kernel.LET)
    exec_ms = np.full((len(pairs), top + 1), np.inf)
    by_gpu: dict[int, list[Gpulet]] = {}
    for let in plan.gpulets:
        by_gpu.setdefault(let.gpu, []).append(let)
    for k, (i, let, seat) in enumerate(pairs):
        profile = profiles[let.gpu_model]
        pressure = planned_pressure(profile, neighbours(profile, let, by_gpu[let.gpu]))
        seats[k] = (index[seat.service], i, seat.batch, hold * let.duty_ms)
        for b in range(1, seat.batch + 1):
            exec_ms[k, b] = profile.effective_ms(seat.model, b, let.partition, pressure)
    first = 0
    for i, let in enumerate(plan.gpulets):
        lets[i]["first"], lets[i]["count"], lets[i]["gpu"] = first, len(let.seats), let.gpu
        lets[i]["turn"], lets[i]["due"] = len(let.seats) - 1, np.inf
        first += len(let.seats)
    queues = np.zeros(len(services), kernel.QUEUE)
    size = 1 << max(1, math.ceil(math.log2(max(s.max_queue for s in services) + 1)))
    if size > MAX_RING:
        raise InputError(f"a queue can have at most {MAX_RING - 1} requests", field="max_queue")
    seats_of: list[int] = []
    for s, service in enumerate(services):
        mine = sorted(np.nonzero(seats["svc"] == s)[0].tolist(), key=lambda k: (exec_ms[k, 1], k))
        queues[s] = (0, 0, service.max_queue, len(seats_of), len(mine))
        seats_of += mine
    return kernel.Desk(
        seats, lets, queues, np.zeros((len(services), size), kernel.WAIT), np.array(seats_of, np.int64), exec_ms,
        np.zeros(size * len(services), kernel.DROP), np.zeros(1, np.int64),
    )  # fmt: skip


class Dispatcher:
    """The state machine that carries out a serving plan: which gpulet (part of a GPU) runs which requests in a batch.
    `request`, `done` and `wake` each return the instructions that follow.

    Request numbers count from 0 within each service. `next_wake_ms` is when `wake` is due if nothing else happens (inf:
    never). Times are milliseconds on the caller's clock and must not decrease.
    """

    def __init__(
        self, plan: ServingPlan, services: Sequence[Service], profiles: Mapping[str, ServingProfile], hold: float = 0.0
    ) -> None:
        self.plan = plan
        self.services = list(services)
        self._index = {s.name: i for i, s in enumerate(services)}
        self.desk = build_desk(plan, services, profiles, hold)
        self._tags = self.desk.ring["tag"]

    def request(self, service: str, now_ms: float, deadline_ms: float | None = None) -> tuple[int, list[Instruction]]:
        """Called when a request has arrived. Returns its number and the instructions that follow. `deadline_ms`: time
        of its deadline; by default now + SLO, and no deadline for best-effort services.
        """
        s = self._index[service]
        own = self.services[s]
        if deadline_ms is None:
            deadline_ms = now_ms + own.slo_ms if own.latency_sensitive else math.inf
        number = int(kernel.offer(self.desk, s, now_ms, deadline_ms, -1))
        if number < 0:
            return -1, [Drop(service, -1, "full")]
        i = int(kernel.idle_let(self.desk, s))
        return number, self._start(i, now_ms) if i >= 0 else []

    def done(self, gpulet: int, now_ms: float) -> list[Instruction]:
        """Called when the batch on a gpulet has finished (or failed). Returns the instructions that follow."""
        kernel.finish(self.desk, gpulet)
        return self._start(gpulet, now_ms)

    def wake(self, now_ms: float) -> list[Instruction]:
        """Start the batches that were held back until now."""
        due = np.nonzero((self.desk.lets["due"] <= now_ms) & (self.desk.lets["busy"] == 0))[0]
        return [x for i in due.tolist() for x in self._start(i, now_ms)]

    def expire(self, now_ms: float) -> list[Instruction]:
        """Drop the requests at the heads of queues whose deadline has passed. A gpulet drops late requests when it
        takes its next batch; this call is for queues from which no gpulet (part of a GPU) takes a batch for a long
        time.
        """
        for s in range(len(self.services)):
            kernel.expire(self.desk, s, now_ms)
        return self._dropped()

    def withdraw(self, service: str, request: int) -> bool:
        """Remove a request from its queue. Returns False if it no longer waits there."""
        return bool(kernel.withdraw(self.desk, self._index[service], request))

    def hold(self, gpulet: int) -> None:
        """Take a gpulet (part of a GPU) that has no worker out of service until `done` is called for it."""
        self.desk.lets[gpulet]["busy"] = 1

    def clear(self, service: str) -> None:
        """Drop all waiting requests of a service."""
        queue = self.desk.queues[self._index[service]]
        queue["head"] = queue["tail"]

    def queue(self, service: str, now_ms: float, deadline_ms: float) -> int:
        """Queue a request without starting a batch. Returns its number, or -1 if the queue is full."""
        return int(kernel.offer(self.desk, self._index[service], now_ms, deadline_ms, -1))

    @property
    def next_wake_ms(self) -> float:
        idle = self.desk.lets["busy"] == 0
        return float(self.desk.lets["due"][idle].min()) if idle.any() else math.inf

    def waiting(self, service: str) -> int:
        """Return the number of requests in a service's queue."""
        queue = self.desk.queues[self._index[service]]
        return int(queue["tail"] - queue["head"])

    def _dropped(self) -> list[Instruction]:
        out: list[Instruction] = []
        for row in self.desk.drops[: self.desk.ndrops[0]]:
            out.append(Drop(self.services[row["svc"]].name, int(row["tag"]), "late"))
        self.desk.ndrops[0] = 0
        return out

    def _start(self, i: int, now_ms: float) -> list[Instruction]:
        count = int(kernel.start(self.desk, i, now_ms))
        out = self._dropped()
        if count > 0:
            let = self.desk.lets[i]
            k = int(let["seat"])
            s, first = int(self.desk.seats[k]["svc"]), int(let["seq"])
            tags = self._tags[s]
            requests = tuple(int(tags[at & (len(tags) - 1)]) for at in range(first, first + count))
            out.append(Start(i, self.services[s].name, requests, float(self.desk.exec_ms[k, count])))
        return out


def warm() -> None:
    """Compile (or load) all functions that the first request would otherwise have to wait for."""
    service = Service("warm", "warm", 1.0, 1000.0)
    model = ModelProfile("warm", 0, {"100%": ((1, 1.0),)})
    profiles = {"warm": ServingProfile("warm", "", 0, (Partition(1.0, "100%"),), {"warm": model})}
    let = Gpulet(0, "warm", "100%", 100.0, 0, 1.0, (Seat("warm", "warm", 1, 1.0),))
    desk = Dispatcher(ServingPlan("warm", 1, (let,)), [service], profiles)
    desk.request("warm", 0.0)
    desk.request("warm", 0.0)
    desk.queue("warm", 0.0, 1.0)
    desk.withdraw("warm", 1)
    desk.done(0, 0.5)
    desk.expire(5.0)
    desk.wake(5.0)
