"""Simulates a trace of requests to language models on shared GPUs, with the batching, the residency policy and the
shares of a live server.

Events are arrivals, ends of steps, ends of moves, and times that the policy requested. Moves (loading, eviction and
restoring of models) take the times of `MoveRates` and the models' start times. They do not slow down steps of other
models, because copies run concurrently with kernels.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cotenant.core.metrics.tokens import Target, TokenTimes
from cotenant.policy.llm_batching import Batcher
from cotenant.policy.residency import Do, ModelFacts, ModelResidency, ModelSettings, MoveRates
from cotenant.profiles.llm.profile import LlmProfile
from cotenant.sim.llm.gpu import SharedGpu
from cotenant.workloads.llm.trace import TokenTrace

STOP_S = 1.0  # time in seconds that a model's program takes to end


@dataclass(frozen=True)
class SimModel:
    """A model: its description for the policy, its step times, and its weight among the models on a GPU (under `fixed`
    sharing: its fraction of the GPU)."""

    facts: ModelFacts
    profile: LlmProfile
    target: Target
    weight: float = 1.0
    max_concurrency: int = 256
    max_queue: int = 1000


@dataclass(frozen=True)
class LlmSetup:
    """The GPUs of a simulation of language models, and the rules by which they are shared. `warm`: at the start,
    models are made resident as far as they fit, in the order of `models`, but those with `facts.kept` first.
    `prefix_cache`: tokens that the trace marks as cached need no prefill.
    """

    models: tuple[SimModel, ...]
    gpu_bytes: tuple[int, ...]
    sharing: str = "conserving"
    warm: bool = True
    prefix_cache: bool = False
    settings: ModelSettings = field(default_factory=ModelSettings)
    host_bytes: int | None = None


@dataclass(frozen=True)
class Switch:
    """A move of a model's program to or from a GPU, which begins at `at_s` and takes `seconds`. If `do` is None, the
    model was resident at the start."""

    at_s: float
    seconds: float
    model: int
    gpu: int
    do: Do | None


@dataclass(frozen=True)
class LlmResult:
    """The result of a simulation of language models."""

    trace: TokenTrace
    setup: LlmSetup
    times: TokenTimes
    refused: np.ndarray  # number of requests to each model that were refused because the queue was full
    switches: tuple[Switch, ...]
    busy_s: tuple[float, ...]
    preempted: tuple[int, ...]
    end_s: float

    @property
    def targets(self) -> tuple[Target, ...]:
        """Return the SLOs of the models, in their order."""
        return tuple(m.target for m in self.setup.models)

    def summary(self) -> dict[str, Any]:
        """Return figures for each model and for all together."""
        span = max(self.end_s, 1e-9)
        rows = self.times.rows(self.targets, span)
        switches = [s for s in self.switches if s.do is not None]
        for index, row in enumerate(rows.values()):
            mine = [s for s in switches if s.model == index]
            row["refused"] = int(self.refused[self.times.model == index].sum())
            row["preempted"] = self.preempted[index]
            for name, do in (("starts", Do.START), ("evictions", Do.EVICT), ("returns", Do.BRING), ("stops", Do.STOP)):
                row[name] = sum(s.do is do for s in mine)
            row["move_s"] = sum(s.seconds for s in mine)
        return {
            "trace": self.trace.summary(), "models": rows, "total": self.times.total(self.targets, span),
            "gpus": [
                {"busy": busy / span, "memory_bytes": held}
                for busy, held in zip(self.busy_s, self.setup.gpu_bytes, strict=True)
            ],
            "switches": len(switches), "span_s": self.end_s,
            "sharing": self.setup.sharing,
        }  # fmt: skip


class _Model:
    """The state of one model during a run."""

    def __init__(self, index: int, model: SimModel) -> None:
        self.index, self.config = index, model
        self.name = model.facts.name
        self.batcher = Batcher(model.profile)
        self.queue: deque[int] = deque()
        self.gpu = -1
        self.busy = False  # whether a step of the model is running


class _Run:
    def __init__(self, trace: TokenTrace, setup: LlmSetup, progress: Callable[[int], None]) -> None:
        self.trace, self.setup, self._progress = trace, setup, progress
        self.models = [_Model(i, m) for i, m in enumerate(setup.models)]
        self.by_name = {m.name: m for m in self.models}
        # The policy learns its own rates from the times of moves. If it changed these, each move would add its fixed
        # time to the next one, and moves would become slower and slower.
        self.rates = MoveRates()
        self.policy = ModelResidency(
            setup.gpu_bytes, [m.facts for m in setup.models], setup.settings, setup.host_bytes
        )
        self.gpus = [SharedGpu(setup.sharing) for _ in setup.gpu_bytes]
        self.first = np.full(len(trace), np.nan)
        self.last = np.full(len(trace), np.nan)
        self.refused = np.zeros(len(trace), bool)
        self.switches: list[Switch] = []
        # queue of events: (time, order, kind, and two values that depend on the kind)
        self._heap: list[tuple[float, int, int, int, int]] = []
        self._order = 0
        self._wake_s = math.inf
        self._waiting: set[int] = set()  # models with requests that no program has received yet
        self._ready: set[int] = set()  # models whose next step (iteration of a batch) may begin
        self.now_s = 0.0

    STEP, MOVED, WAKE, ENTER = 0, 1, 2, 3

    def _push(self, at_s: float, kind: int, a: int = 0, b: int = 0) -> None:
        self._order += 1
        heapq.heappush(self._heap, (at_s, self._order, kind, a, b))

    def run(self) -> None:
        """Run the simulation until the last request is answered."""
        times, which = self.trace.times_s.tolist(), self.trace.model.tolist()
        if self.setup.warm:
            self._warm()
        self._decide()
        at, count = 0, len(times)
        while True:
            due_s = times[at] if at < count else math.inf
            next_s = min(due_s, self._heap[0][0] if self._heap else math.inf)
            # the next steps begin only when all events of the present time are processed
            if self._ready and next_s > self.now_s:
                ready, self._ready = sorted(self._ready), set()
                for index in ready:
                    self._step(self.models[index])
            elif next_s == math.inf:
                return
            elif due_s <= next_s:
                self.now_s = due_s
                self._arrive(at, self.models[which[at]])
                at += 1
                self._progress(at)
            else:
                self.now_s, _, kind, a, b = heapq.heappop(self._heap)
                self._event(kind, a, b)

    def _event(self, kind: int, a: int, b: int) -> None:
        if kind == self.STEP:
            if self.gpus[a].version == b:
                self._step_over(a)
        elif kind == self.MOVED:
            self._moved(self.models[a], b / 1e9)
        elif kind == self.ENTER:
            self._enter(self.models[a], b)
        elif self.now_s >= self._wake_s:
            self._wake_s = math.inf
            self._decide()

    def _warm(self) -> None:
        """Make the models that fit resident at the start."""
        free = list(self.setup.gpu_bytes)
        for model in sorted(self.models, key=lambda m: not m.config.facts.kept):
            need = model.config.facts.memory_bytes
            gpu = max(range(len(free)), key=free.__getitem__)
            if need > free[gpu]:
                continue
            free[gpu] -= need
            self.policy.arrived(model.name, 0.0)
            for action in self.policy.decide(0.0):
                self.by_name[action.model].gpu = action.gpu
                self.switches.append(Switch(0.0, 0.0, model.index, action.gpu, None))
                self.policy.settled(action.model, 0.0)
            self.policy.withdrawn(model.name, 0.0)

    def _arrive(self, request: int, model: _Model) -> None:
        if len(model.queue) >= model.config.max_queue:
            self.refused[request] = True
            return
        model.queue.append(request)
        self._waiting.add(model.index)
        self.policy.arrived(model.name, self.now_s)
        self._admit(model)
        if model.queue:
            self._decide()

    def _decide(self) -> None:
        for action in self.policy.decide(self.now_s):
            model = self.by_name[action.model]
            held = model.config.facts.memory_bytes
            if action.do is Do.START:
                seconds = self.policy.rows[action.model].start_s
            elif action.do in (Do.BRING, Do.EXCHANGE):
                out = sum(self.by_name[name].config.facts.memory_bytes for name in action.instead_of)
                seconds = self.rates.seconds(out, held)
            elif action.do is Do.EVICT:
                seconds = self.rates.seconds(held, 0)
            else:
                seconds = STOP_S
            # both parts of an exchange end when all memory has been moved
            for name in action.instead_of:
                self._move(self.by_name[name], action.gpu, Do.EVICT, seconds)
            self._move(model, action.gpu, Do.BRING if action.do is Do.EXCHANGE else action.do, seconds)
        if self.policy.wake_s < self._wake_s:
            self._wake_s = self.policy.wake_s
            self._push(max(self._wake_s, self.now_s), self.WAKE)
        for index in list(self._waiting):
            self._admit(self.models[index])

    def _move(self, model: _Model, gpu: int, do: Do, seconds: float) -> None:
        model.gpu = gpu
        self.switches.append(Switch(self.now_s, seconds, model.index, gpu, do))
        self._push(self.now_s + seconds, self.MOVED, model.index, round(seconds * 1e9))

    def _moved(self, model: _Model, seconds: float) -> None:
        self.policy.settled(model.name, self.now_s, seconds)
        self._decide()

    def _admit(self, model: _Model) -> None:
        """Give the model's program the waiting requests that the residency policy admits."""
        row = self.policy.rows[model.name]
        while model.queue and row.open < model.config.max_concurrency and self.policy.admits(model.name):
            request = model.queue.popleft()
            self.policy.began(model.name, self.now_s)
            if outside_s := model.config.profile.request_s:
                self._push(self.now_s + outside_s, self.ENTER, model.index, request)
            else:
                self._enter(model, request)
        if not model.queue:
            self._waiting.discard(model.index)

    def _enter(self, model: _Model, request: int) -> None:
        """Give a request to the model's batches."""
        cached = int(self.trace.cached[request]) if self.setup.prefix_cache else 0
        model.batcher.add(request, int(self.trace.prompt[request]), int(self.trace.output[request]), cached)
        if not model.busy:
            self._ready.add(model.index)

    def _step(self, model: _Model) -> None:
        step = model.batcher.begin()
        model.busy = step is not None
        if step is not None:
            config, gpu = model.config, self.gpus[model.gpu]
            seconds = config.profile.times.seconds(step)
            gpu.begin(model.index, seconds, config.weight, config.facts.best_effort, self.now_s)
            self._foretell(model.gpu)

    def _foretell(self, gpu: int) -> None:
        at_s, key = self.gpus[gpu].next_end()
        if key >= 0:
            self._push(max(at_s, self.now_s), self.STEP, gpu, self.gpus[gpu].version)

    def _step_over(self, gpu: int) -> None:
        _, key = self.gpus[gpu].next_end()
        model = self.models[key]
        self.gpus[gpu].end(key, self.now_s)
        model.busy = False
        ended = 0
        for token in model.batcher.end():
            if np.isnan(self.first[token.id]):
                self.first[token.id] = self.now_s
            if token.last:
                self.last[token.id] = self.now_s
                self.policy.ended(model.name, self.now_s)
                ended += 1
        if ended and model.queue:
            self._admit(model)
        self._ready.add(model.index)
        self._foretell(gpu)
        if ended and self._waiting:
            self._decide()


def simulate(trace: TokenTrace, setup: LlmSetup, progress: Callable[[int], None] = lambda done: None) -> LlmResult:
    """Simulate a trace whose `models` are those of the setup, in the same order. Requests that no model can serve must
    have been removed."""
    assert trace.models == tuple(m.facts.name for m in setup.models)
    run = _Run(trace, setup, progress)
    run.run()
    times = TokenTimes(trace.model, trace.times_s, run.first, run.last, trace.prompt, trace.output)
    return LlmResult(
        trace, setup, times, run.refused, tuple(run.switches), tuple(g.busy_s for g in run.gpus),
        tuple(m.batcher.preempted for m in run.models), run.now_s,
    )  # fmt: skip


def longest(models: Sequence[SimModel]) -> list[int]:
    """Return the largest number of tokens that one request may have, for each model."""
    return [min(m.profile.max_context, m.profile.kv_tokens) for m in models]
