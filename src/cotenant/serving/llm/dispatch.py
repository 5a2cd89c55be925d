"""The queues of all models, and their programs. Executes the decisions of policy/residency/models.py.

Everything here runs in one event loop, so there are no locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from cotenant.core.background import spawn
from cotenant.core.errors import InputError, NoHostMemoryError, WorkError
from cotenant.policy.residency import Action, Do, ModelResidency, ModelSettings, Place
from cotenant.serving.config.models import ModelsConfig
from cotenant.serving.gateway.pages import Tell
from cotenant.serving.llm.keeper import Keeper
from cotenant.serving.llm.model import Model
from cotenant.serving.llm.moves import Moves
from cotenant.serving.llm.openai import OpenAIError
from cotenant.serving.llm.plain_host import Host
from cotenant.serving.llm.program import Program, launch
from cotenant.serving.llm.tickets import Ticket

LOG = logging.getLogger(__name__)

# seconds until a failed program is started again: after its first failure, and after many failures
FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 60.0
# a request for a model whose program will be restarted waits if the pause is at most this long; otherwise it is refused
WAITED_FOR_S = 4.0
AGENT_RETRY_S = 5.0
DRAIN_POLL_S = 0.02


class Dispatch:
    """All models of a server. `tell` gets a sentence about each decision."""

    def __init__(
        self, config: ModelsConfig, host: Host, keeper: Keeper, logs: Path, tell: Tell
    ) -> None:
        self.config, self._host, self._keeper, self._logs, self._tell = config, host, keeper, logs, tell
        host_bytes = config.raw.host_memory if host.moves else 0
        self.policy = ModelResidency(
            [gpu.memory_bytes for gpu in host.gpus], config.facts(), ModelSettings(idle_s=config.raw.idle), host_bytes
        )
        self.models = {m.name: Model(m, self.policy.rows[m.name]) for m in config.models}
        self._moves = Moves(host, self.policy, tell, self._end)
        self.tickets: set[Ticket] = set()  # the requests that have no answer yet, waiting or running
        self.draining = False
        self._agent_lost = False  # so no model can be started or moved
        self._unreachable = ""  # why requests are refused: the agent has been out of reach for too long
        self._lasting: frozenset[str] = frozenset()  # models whose programs use the GPU without the agent
        self._programs: set[Program] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._alarm: asyncio.TimerHandle | None = None

    # ---- requests ----

    def submit(self, ticket: Ticket) -> None:
        """Accept a request for a language model. Raises OpenAIError if the request cannot be accepted."""
        model = self.models[ticket.model]
        now_s = time.monotonic()
        if self.draining:
            raise OpenAIError(503, "the server is shutting down", "shutting_down", retry_s=5.0)
        if self._unreachable and not self._lasts(model):
            model.stats.finished("unavailable", None, None)
            raise OpenAIError(503, self._unreachable, "model_unavailable", retry_s=AGENT_RETRY_S)
        if model.fault and model.row.not_before_s > now_s + WAITED_FOR_S:
            model.stats.finished("unavailable", None, None)
            wait_s = model.row.not_before_s - now_s
            text = f"{ticket.model} is not available: {model.fault}"
            raise OpenAIError(503, text, "model_unavailable", retry_s=wait_s)
        if (count := len(self.tickets)) >= self.config.raw.listen.max_in_flight:
            model.stats.finished("full", None, None)
            text = f"the server has {count} request{'s' * (count != 1)} in flight already"
            raise OpenAIError(429, text, "server_full", retry_s=1.0)
        if len(model.queue) >= model.entry.max_queue:
            model.stats.finished("full", None, None)
            wait_s = self.policy.wait_s(ticket.model, now_s)
            text = f"{len(model.queue)} requests are already waiting for {ticket.model}"
            raise OpenAIError(429, text, "queue_full", retry_s=max(1.0, wait_s))
        self._notice(model)
        self.tickets.add(ticket)
        model.queue.append(ticket)
        self.policy.arrived(ticket.model, now_s)
        if not self._pump(model, now_s):
            self.turn()

    def agent_lost(self, lost: bool) -> None:
        """While the agent is lost, models stay where they are, and resident ones get requests."""
        self._agent_lost = lost
        for model in self.models.values() if lost else ():
            model.row.draining = False
        self.turn()

    def refuse(self, why: str, lasting: frozenset[str]) -> None:
        """Refuse waiting requests and new ones for this reason, until it is called with an empty text. Those for
        resident models among `lasting` are still served.
        """
        self._unreachable, self._lasting = why, lasting
        for model in self.models.values() if why else ():
            for ticket in () if self._lasts(model) else list(model.queue):
                self._refuse_unreachable(ticket)

    def _lasts(self, model: Model) -> bool:
        """Whether the model's program can answer a request without the agent."""
        return model.entry.name in self._lasting and self.policy.admits(model.entry.name)

    def _refuse_unreachable(self, ticket: Ticket) -> None:
        error = OpenAIError(503, self._unreachable, "model_unavailable", retry_s=AGENT_RETRY_S)
        ticket.fail(error, "unavailable")

    def _pump(self, model: Model, now_s: float) -> bool:
        """Send the program as many requests as it can take; returns whether the queue is empty."""
        name, most = model.entry.name, model.entry.max_concurrency
        while model.queue and model.program is not None and model.row.open < most and self.policy.admits(name):
            ticket = model.queue.popleft()
            self.policy.began(name, now_s)
            ticket.send(model.program)
        return not model.queue

    def over(self, ticket: Ticket, outcome: str) -> None:
        """Called when a request has been answered, or its client has disconnected."""
        model, now_s = self.models[ticket.model], time.monotonic()
        self.tickets.discard(ticket)
        model.stats.finished(outcome, ticket.times, None if ticket.streamed else now_s - ticket.arrived_s)
        if outcome == "ok":
            model.failures = 0
            if ticket.estimated and not model.estimated:
                model.estimated = True
                text = "its program reports no number of tokens, so its TPOT is the time per event of its streams"
                self._tell(f"{model.entry.name}: {text}, which may have several tokens")
        if ticket.running:
            self.policy.ended(ticket.model, now_s)
            if model.queue:
                self._pump(model, now_s)
        else:
            model.queue.remove(ticket)
            self.policy.withdrawn(ticket.model, now_s)
        if self.policy.wanting:
            self.turn()

    def again(self, ticket: Ticket, why: str) -> None:
        """Queue a request again, before all other requests, because its program failed."""
        model, now_s = self.models[ticket.model], time.monotonic()
        self._notice(model)
        model.stats.retries += 1
        self.policy.ended(ticket.model, now_s)
        model.queue.appendleft(ticket)
        self.policy.arrived(ticket.model, now_s)
        LOG.info("%s: a request is sent to the program again: %s", ticket.model, why)
        if self._unreachable and not self._lasts(model):
            self._refuse_unreachable(ticket)
        elif model.fault and model.row.not_before_s > now_s + WAITED_FOR_S:
            self._refuse_all(model)
        elif not self._pump(model, now_s):
            self.turn()

    def look(self) -> None:
        """Give up requests whose programs have sent nothing for too long. Called once a second."""
        most_s = self.config.raw.answer_timeout
        late_s = time.monotonic() - most_s
        for ticket in [t for t in self.tickets if t.running and t.heard_s < late_s]:
            text = f"the program of {ticket.model} has sent nothing of this answer for {most_s:g} s"
            ticket.fail(OpenAIError(504, text, "program_silent"), "failed")

    # ---- decisions ----

    def turn(self) -> None:
        """Ask the policy for decisions, and start to execute them."""
        now_s = time.monotonic()
        for action in () if self._agent_lost else self.policy.decide(now_s):
            self._begin(action)
        for model in self._waiting():
            self._pump(model, now_s)
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self.policy.wake_s < math.inf and not self._agent_lost:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(max(0.001, self.policy.wake_s - now_s), self.turn)

    def _waiting(self) -> list[Model]:
        """Return the models that have waiting requests and are on a GPU, or are being moved to or from one. Some of
        these models must not be sent requests now, for example those that are to leave the GPU; `_pump` checks this.
        """
        return [self.models[name] for name in self.policy.resident if self.models[name].queue]

    def _begin(self, action: Action) -> None:
        model = self.models[action.model]
        moves, others = self._moves, [self.models[name] for name in action.instead_of]
        if action.do is Do.EXCHANGE:
            spawn(self._tasks, self._carry_out(moves.exchange(model, others, action.gpu), model, *others))
            return
        work = {Do.START: self._start, Do.EVICT: moves.evict, Do.BRING: moves.bring, Do.STOP: moves.stop}[action.do]
        spawn(self._tasks, self._carry_out(work(model, action.gpu), model))

    async def _carry_out(self, work: Coroutine[Any, Any, None], *models: Model) -> None:
        names = sorted(model.entry.name for model in models)  # in one order, so that no two actions wait for each other
        try:
            async with contextlib.AsyncExitStack() as acting:
                for name in names:
                    await acting.enter_async_context(self.models[name].acting)
                await work
        except Exception as error:  # if the task fails, the models must not stay in a transitional state
            LOG.error("%s: exception in a background task", ", ".join(names), exc_info=error)
            for name in names:
                self.policy.failed(name, time.monotonic(), MOST_PAUSE_S)
        self.turn()

    async def _start(self, model: Model, gpu: int) -> None:
        name, began_s = model.entry.name, time.monotonic()
        self._tell(f"{name} is started on GPU {self._host.gpus[gpu].index}")
        try:
            program = await self._launch(model, gpu)
        except (InputError, WorkError) as error:
            self._not_started(model, str(error))
            return
        self._programs.add(program)
        try:
            await program.ready(self.config.raw.load_timeout)
        except WorkError as error:
            await self._gone(program)
            self._not_started(model, str(error))
            return
        model.program = program
        took_s = time.monotonic() - began_s
        model.fault = ""
        model.stats.switched("start", took_s)
        self.policy.settled(name, time.monotonic(), took_s)
        spawn(self._tasks, self._watch(model, program))
        self._tell(f"{name} is ready after {took_s:.1f} s")

    async def _launch(self, model: Model, gpu: int) -> Program:
        """Start a model's program. If host memory is exhausted, programs without requests are stopped first: evicted
        ones, then those on a GPU of no higher rank, because host memory is reserved for them as well."""
        while True:
            try:
                return await launch(model.entry, gpu, self._host, self._keeper, self._logs)
            except NoHostMemoryError:
                found = [m for m in self.models.values() if m.row.idle and not m.row.facts.kept]
                evicted = [m for m in found if m.row.place is Place.EVICTED]
                rank = model.row.facts.rank
                resident = [m for m in found if m.row.place is Place.RESIDENT and m.row.facts.rank <= rank]
                if not evicted and sum(m.entry.memory for m in resident) < model.entry.memory:
                    raise  # it would not be enough, so nothing is stopped in vain
                await self._forget(min(evicted or resident, key=lambda m: m.row.used_s))

    async def _forget(self, model: Model) -> None:
        async with model.acting:
            began_s = time.monotonic()
            self.policy.died(model.entry.name, began_s)
            self._tell(f"{model.entry.name} is stopped: its host memory is needed")
            await self._end(model)
            await self._host.released(model.entry.name)
            model.stats.switched("stop", time.monotonic() - began_s)

    def _not_started(self, model: Model, why: str) -> None:
        model.fault = f"its program could not be started: {why}"
        self._tell(f"{model.entry.name}: {model.fault}", logging.WARNING)
        self.policy.failed(model.entry.name, time.monotonic(), self._pause_s(model))
        self._refuse_all(model)

    def _pause_s(self, model: Model) -> float:
        model.failures += 1
        return min(MOST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (model.failures - 1))

    def _refuse_all(self, model: Model) -> None:
        wait_s = max(1.0, model.row.not_before_s - time.monotonic())
        text = f"{model.entry.name} is not available: {model.fault}"
        for ticket in list(model.queue):
            ticket.fail(OpenAIError(503, text, "model_unavailable", retry_s=wait_s), "unavailable")

    async def _watch(self, model: Model, program: Program) -> None:
        await program.ended.wait()
        self._notice(model)

    def _notice(self, model: Model) -> None:
        """Handle a program that ended unexpectedly. This runs before its failed requests are handled."""
        program = model.program
        if program is None or not program.ended.is_set():
            return
        model.program = None
        self._programs.discard(program)
        model.stats.deaths += 1
        # the program is restarted at once, unless it has answered no request since its previous failure
        pause_s = 0.0
        if model.failures:
            pause_s = self._pause_s(model)
        else:
            model.failures = 1
        model.fault = f"its program ended: {program.why_ended}"
        self._tell(f"{model.entry.name}: {program.why_ended}; it is restarted", logging.WARNING)
        self.policy.died(model.entry.name, time.monotonic(), pause_s)
        if pause_s > WAITED_FOR_S:
            self._refuse_all(model)
        self.turn()

    async def _end(self, model: Model) -> None:
        program, model.program = model.program, None
        if program is not None:
            await self._gone(program)

    async def _gone(self, program: Program) -> None:
        await program.stop()
        self._programs.discard(program)

    # ---- the end ----

    async def drain(self, limit_s: float) -> None:
        """Accept no more requests; wait at most `limit_s` for the present ones, then cut them off."""
        self.draining = True
        deadline = time.monotonic() + limit_s
        while self.tickets and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        self.cut()
        await asyncio.sleep(DRAIN_POLL_S)  # until the answers are sent

    def cut(self) -> None:
        """Answer all requests that have no answer yet with an error; a stream that has begun ends with it."""
        for ticket in list(self.tickets):
            ticket.fail(OpenAIError(503, "the server is shutting down", "shutting_down", retry_s=5.0), "failed")

    async def close(self) -> None:
        """Stop all programs."""
        if self._alarm is not None:
            self._alarm.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for model in self.models.values():
            model.program = None
        await asyncio.gather(*(self._gone(program) for program in list(self._programs)))
