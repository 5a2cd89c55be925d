"""Plans of language models on parts of GPUs, verified by simulated requests. A part is a MIG instance or a fraction of
the SMs; models on one part take turns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cotenant.core.metrics.tokens import Target
from cotenant.core.serving import Gpulet, ServingPlan
from cotenant.policy.residency import ModelFacts
from cotenant.policy.serving.packing.replan import Sizer
from cotenant.policy.serving.packing.specs import DEFAULT_PLANNER, find_planner
from cotenant.policy.serving.packing.tables import Gpus
from cotenant.profiles.llm.partitions import Engine, Traffic, as_services
from cotenant.profiles.llm.profile import pairs_of
from cotenant.profiles.serving.latency import ServingProfile
from cotenant.sim.llm.engine import LlmSetup, SimModel, simulate
from cotenant.workloads.llm.trace import TokenTrace

GROWTH = 1.12
ROUNDS = 16
TIME_LIMIT_S = 30.0
LONG_PROMPT = 99  # the time to the first token is planned for this percentile of the prompts' lengths


@dataclass(frozen=True)
class DividedPlan:
    """A plan of language models on parts of GPUs, with rates in decoded tokens/s. `attainment`: simulated fraction of
    the requests that keep their SLO, for each model that has requests. `factors`: the plan was made for each model's
    rate times the model's factor.
    """

    plan: ServingPlan
    profile: ServingProfile
    attainment: Mapping[str, float]
    factors: Mapping[str, float]

    def holds(self, target: float, judged: Sequence[str]) -> bool:
        """Whether all models are placed, and the SLO attainment of each model in `judged` reaches the target."""
        return self.plan.feasible and all(self.attainment.get(name, 1.0) >= target for name in judged)


def traffic_of(trace: TokenTrace, model: int, span_s: float) -> Traffic:
    """Return the rate and the lengths of the requests to one model of a trace of `span_s` seconds. The trace must have
    requests to the model.
    """
    mine = trace.model == model
    prompt, decodes = trace.prompt[mine].astype(float), np.maximum(1.0, trace.output[mine] - 1.0)
    # each decoding step of a request reads its prompt, the first token, and the tokens that were decoded before
    context = (decodes * (prompt + (decodes + 1.0) / 2.0)).sum() / decodes.sum()
    pairs = [pairs_of(int(x)) for x in prompt]
    longest, rate_rps = math.ceil(np.percentile(prompt, LONG_PROMPT)), len(prompt) / span_s
    return Traffic(
        rate_rps, float(prompt.mean()), float(np.mean(pairs)), float(decodes.mean()), float(context), longest
    )  # fmt: skip


def plan_divided(
    engines: Sequence[Engine], base: ServingProfile, most_gpus: int, headroom: float, target: float, trace: TokenTrace,
    seed: int = 0,
) -> DividedPlan:  # fmt: skip
    """Find the fewest GPUs, each divided as `base` says, on which simulated requests reach `target`. `trace.models` are
    the engines, in their order. If more than `most_gpus` would be needed, returns the last plan that placed all models,
    or the first plan, which states what it left out."""
    profile, services = as_services(base, engines)
    sizer = Sizer(find_planner(DEFAULT_PLANNER), Gpus.uniform(profile, most_gpus), services, TIME_LIMIT_S)
    factors = dict.fromkeys((e.name for e in engines), headroom)
    judged = [e.name for e in engines if e.latency_sensitive]
    best: DividedPlan | None = None
    for round_ in range(ROUNDS):
        plan = sizer.fewest([s.rate_rps * factors[s.name] for s in services])
        if not plan.feasible:
            return best or DividedPlan(plan, profile, {}, dict(factors))
        reached = attainment(plan, profile, engines, trace, seed + round_)
        now = DividedPlan(plan, profile, reached, dict(factors))
        worst = [min((x.attainment.get(name, 1.0) for name in judged), default=1.0) for x in (now, best or now)]
        best = now if best is None or worst[0] >= worst[1] else best
        short = [name for name in judged if reached.get(name, 1.0) < target]
        if not short:
            return now
        for name in short:
            factors[name] *= GROWTH
    assert best is not None
    return best


def attainment(
    plan: ServingPlan, profile: ServingProfile, engines: Sequence[Engine], trace: TokenTrace, seed: int
) -> dict[str, float]:
    """Return the fraction of each model's requests that keep the limits of TTFT and TPOT. A request goes to a random
    gpulet (part of a GPU) of its model, with a probability in proportion to the rates planned there. The time of a
    gpulet is shared among its engines in proportion to the lengths of their steps with the planned batches.
    """
    by_name = {e.name: e for e in engines}
    kept: dict[str, list[float]] = {}
    to = _assigned(plan, trace, np.random.default_rng([seed, 21]))
    for let, rows in zip(plan.gpulets, to, strict=True):
        here = trace.keep(rows)
        if not len(here):
            continue
        names = [seat.service for seat in let.seats]
        setup = _setup(let, [by_name[name] for name in names], profile)
        index = np.array([names.index(name) if name in names else 0 for name in trace.models], np.int32)
        part = replace(here, models=tuple(names), model=index[here.model])
        result = simulate(part, setup)
        good = result.times.kept(result.targets)
        for i, name in enumerate(names):
            kept.setdefault(name, []).extend(good[part.model == i].tolist())
    return {name: float(np.mean(found)) for name, found in kept.items() if found}


def _assigned(plan: ServingPlan, trace: TokenTrace, draw: np.random.Generator) -> list[np.ndarray]:
    """Draw the gpulet (part of a GPU) that serves each request; return a mask of the requests for each gpulet."""
    to = [np.zeros(len(trace), bool) for _ in plan.gpulets]
    for i, name in enumerate(trace.models):
        seats = [(g, seat) for g, let in enumerate(plan.gpulets) for seat in let.seats]
        places = [(g, seat.rate_rps) for g, seat in seats if seat.service == name]
        rows = np.flatnonzero(trace.model == i)
        if not places or not len(rows):
            continue
        share = np.array([rate for _, rate in places])
        chosen = draw.choice(len(places), len(rows), p=share / share.sum())
        for k, (g, _) in enumerate(places):
            to[g][rows[chosen == k]] = True
    return to


def _setup(let: Gpulet, engines: Sequence[Engine], profile: ServingProfile) -> LlmSetup:
    part = profile.partition(let.partition)
    models = []
    for engine, seat in zip(engines, let.seats, strict=True):
        times = engine.times_on(part, profile.slots)
        facts = ModelFacts(engine.name, engine.memory_bytes, not engine.latency_sensitive, engine.priority)
        models.append(
            SimModel(
                facts, replace(engine.profile, times=times), Target(engine.name, engine.ttft_ms, engine.tpot_ms),
                weight=engine.step_ms(times, seat.batch),
            )
        )  # fmt: skip
    return LlmSetup(tuple(models), (sum(e.memory_bytes for e in engines),))
