"""Decides when to replan and for which rates: measures rates, forecasts, chooses the number of GPUs, and calls the
planner process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
from dataclasses import replace

from cotenant.core import pickles
from cotenant.core.errors import InputError, WorkError
from cotenant.core.serving import ServingPlan
from cotenant.policy.serving.autoscale import FORECASTS, Autoscaler
from cotenant.policy.serving.packing.specs import KEPT_APART
from cotenant.serving.config.planning import Problem
from cotenant.serving.config.server import ServingConfig
from cotenant.serving.dispatch.pool import Pool
from cotenant.serving.dispatch.stats import Stats
from cotenant.serving.planning.crew import ApplyError, Crew, Say
from cotenant.serving.planning.planner import Ask
from cotenant.serving.worker import UnavailableError, WorkerFactory

SAMPLE_S = 0.5
LEAST_RATE = 0.01  # lowest rate in requests/s for which a service is planned, so that even an idle one stays reachable
PLAN_LIMIT_S = 120.0
# time limit of the first plan; it is long, because the planner process may have to compile for half a minute or more
FIRST_PLAN_LIMIT_S = 900.0
# largest number of attempts to apply plans; each further attempt leaves out a service that cannot be loaded, or a lost
# GPU
ATTEMPTS = 100


class PlannerProcess:
    """Calls the planner process, one request at a time; starts it with the first, and restarts it when it dies."""

    def __init__(self, problem: Problem, planner: str) -> None:
        self._problem, self._planner = problem, planner
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._lock = asyncio.Lock()

    async def ask(self, ask: Ask) -> ServingPlan:
        """Request a plan from the planner process. Raises InputError if the services cannot be planned, WorkError if no
        answer comes."""
        async with self._lock:
            limit_s = FIRST_PLAN_LIMIT_S if self._streams is None else PLAN_LIMIT_S
            try:
                return await asyncio.wait_for(self._ask(ask), limit_s)
            except TimeoutError:
                await self.close()
                raise WorkError(f"the planner gave no answer within {limit_s:g} s") from None
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                await self.close()
                raise WorkError(f"the planner gave no answer: {error}") from None

    async def _ask(self, ask: Ask) -> ServingPlan:
        reader, writer = self._streams or await self._begin()
        writer.write(pickles.frame(ask))
        answer = await pickles.receive(reader)
        if isinstance(answer, str):
            raise InputError(answer)
        assert isinstance(answer, ServingPlan)
        return answer

    async def _begin(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        with theirs:
            # Linux kills the planner process when the thread that started it ends (PR_SET_PDEATHSIG), so the
            # thread of the event loop starts it
            command = [sys.executable, "-P", "-m", "cotenant.serving.planning.main"]
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno())
        self._streams = await asyncio.open_unix_connection(sock=ours)
        self._streams[1].write(pickles.frame((self._problem, self._planner)))
        return self._streams

    async def close(self) -> None:
        """End the planner process."""
        process, self._process = self._process, None
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()
        if process is not None:
            process.kill()
            while process.poll() is None:
                await asyncio.sleep(0.002)


class Replanner:
    """Makes plans for the current rates and has the worker manager apply them."""

    def __init__(
        self, config: ServingConfig, problem: Problem, pool: Pool, crew: Crew, stats: Stats, factory: WorkerFactory,
        planner: str, say: Say,
    ) -> None:  # fmt: skip
        self.config, self.problem, self.pool, self.crew, self.stats = config, problem, pool, crew, stats
        self.factory, self.say = factory, say
        self.process = PlannerProcess(problem, planner)
        self.fixed: ServingPlan | None = None
        self.configured = {s.name: s.rate_rps for s in problem.services}
        self.trackers = {name: FORECASTS[config.entry.forecast]() for name in self.configured}
        for name, tracker in self.trackers.items():
            tracker.observe(self.configured[name])
        self.measured = dict.fromkeys(self.configured, 0.0)
        self._seen = dict.fromkeys(self.configured, 0)
        count = len(problem.gpus)
        self.held = count
        self.scaler = Autoscaler(most=count, patience=config.entry.patience)
        self.wanted = asyncio.Event()
        self.note = ""

    def usable(self) -> tuple[int, ...]:
        """GPUs that plans may use now."""
        every = range(len(self.problem.gpus))
        found = self.factory.gpus()
        return tuple(every if found is None else [g for g in every if g in set(found)])

    # ---- rates ----

    def sample(self, seconds: float) -> None:
        """Update the rates with the requests that arrived in the last `seconds`."""
        for name, tracker in self.trackers.items():
            received = self.stats.services[name].received
            rate = (received - self._seen[name]) / seconds
            self._seen[name] = received
            tracker.observe(rate)
            self.measured[name] += 0.2 * (rate - self.measured[name])

    def rates(self) -> dict[str, float]:
        """Return the rates to plan for, for all services that can be served: the forecasts. An idle service is planned
        for a fraction of its rate in services.yaml.
        """
        ahead = max(1, round(self.config.deployment.period_s / SAMPLE_S))
        least = self.config.entry.least_rate
        return {
            name: max(LEAST_RATE, least * self.configured[name], self.trackers[name].forecast(ahead))
            for name in self.crew.ready_services()
        }

    # ---- plans ----

    async def first(self) -> None:
        """Make and apply the server's initial plan: for the rates of the configuration file, on all GPUs."""
        await self.make({name: self.configured[name] for name in self.crew.ready_services()}, first=True)

    async def make(self, rates: dict[str, float] | None = None, *, first: bool = False) -> None:
        """Make a plan and apply it. Services whose models cannot be loaded are excluded from the next attempt."""
        for _ in range(ATTEMPTS):
            rates = self.rates() if rates is None else rates
            rates = {name: rate for name, rate in rates.items() if name in self.crew.ready_services()}
            if not rates:
                await self.crew.apply(ServingPlan("none", len(self.problem.gpus), ()))
                return
            plan = await self._decide(rates, first)
            if plan is None:
                return
            try:
                await self.crew.apply(plan)
                return
            except ApplyError as error:
                last = error
        raise WorkError(f"no plan could be applied: {last}")

    async def _decide(self, rates: dict[str, float], first: bool) -> ServingPlan | None:
        """The plan for the rates; None to keep the current one."""
        if self.fixed is not None:
            usable = set(self.usable())
            # services without a rate cannot be served
            held = [
                replace(x, seats=tuple(s for s in x.seats if s.service in rates))
                for x in self.fixed.gpulets if x.gpu in usable
            ]  # fmt: skip
            lets = tuple(x for x in held if x.seats)
            return ServingPlan(self.fixed.planner, self.fixed.gpus, lets, rates_rps=self.fixed.rates_rps)
        gpus = self.usable()
        if not gpus:
            self.note = "no GPU can be used"
            return ServingPlan("none", len(self.problem.gpus), ())
        verify = self.config.entry.verify
        start = None if first else self.pool.plan
        if self.config.entry.autoscale and not first:
            await self._scale(rates, gpus)
        self.stats.replans += 1
        plan = await self.process.ask(Ask(rates, gpus, self.held, start, verify=verify))
        if not plan.feasible and self.held < len(gpus):
            self.held = len(gpus)
            plan = await self.process.ask(Ask(rates, gpus, self.held, start, verify=verify))
        if not plan.feasible:
            short = ", ".join(f"{x.service} lacks {x.missing_rps:.0f} requests/s" for x in plan.left_out)
            note = f"there are not enough GPUs: {short}"
            if KEPT_APART in plan.notes:
                note += f"; {KEPT_APART}"
                if KEPT_APART not in self.note:
                    self.say(note)
            self.note = note
            served = {seat.service for let in self.pool.lets for seat in let.spec.seats}
            if not first and set(rates) <= served and all(let.spec.gpu in gpus for let in self.pool.lets):
                # the served services and the GPUs would stay the same, so moving models would not improve anything
                return None
        else:
            self.note = ""
        return plan

    async def _scale(self, rates: dict[str, float], gpus: tuple[int, ...]) -> None:
        wish = await self.process.ask(Ask(rates, gpus, len(gpus), fewest=True))
        self.scaler.most = len(gpus)
        held = self.scaler.decide(min(self.held, len(gpus)), lambda: wish.gpus_used if wish.feasible else None)
        if held != self.held:
            self.say(f"the number of GPUs in use changes from {self.held} to {held} to suit the request rates")
            self.held = held

    async def run(self) -> None:
        """Measure the request rates continuously. Make a new plan at once if `wanted` is set or the usable GPUs have
        changed and, unless the plan is fixed, once per `period_s`.
        """
        loop = asyncio.get_running_loop()
        last = loop.time()
        due = last + self.config.deployment.period_s
        before = self.usable()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wanted.wait(), SAMPLE_S)
            now = loop.time()
            if now - last >= SAMPLE_S * 0.9:
                self.sample(now - last)
                last = now
            usable = self.usable()
            asked = self.wanted.is_set() or usable != before
            if not asked and (now < due or self.fixed is not None):
                continue
            before = usable
            self.wanted.clear()
            due = loop.time() + self.config.deployment.period_s
            try:
                await self.make()
            except (WorkError, InputError, ApplyError) as error:
                if str(error) != self.note:
                    self.say(f"no new plan: {error}", logging.WARNING)
                self.note = str(error)
                # the plan is not the cause of this failure, so it is tried again later
                if isinstance(error, UnavailableError):
                    loop.call_later(SAMPLE_S, self.wanted.set)
