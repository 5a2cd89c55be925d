"""The planner process's answers: plans for rates on usable GPUs, similar to the current plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cotenant.core.serving import Service, ServingPlan
from cotenant.policy.serving.packing.planners import Packer
from cotenant.policy.serving.packing.replan import Sizer, renamed
from cotenant.serving.config.planning import Problem
from cotenant.sim.serving.verify import plan_verified


@dataclass(frozen=True)
class Ask:
    """A request for a plan for exactly the services in `rates_rps`, on at most `count` of the GPUs `gpus`, similar to
    the plan `start`. `fewest`: use as few GPUs as possible. `verify`: plan for higher rates until the requests of a
    simulation are answered in time.
    """

    rates_rps: Mapping[str, float]
    gpus: tuple[int, ...]
    count: int
    start: ServingPlan | None = None
    fewest: bool = False
    verify: bool = True


class Planner:
    """Answers requests for plans; keeps the planners' tables between requests."""

    def __init__(self, problem: Problem, planner: str) -> None:
        self.problem, self.spec = problem, problem.planner(planner)
        self._sizers: dict[tuple[tuple[str, ...], tuple[int, ...]], Sizer] = {}

    def answer(self, ask: Ask) -> ServingPlan:
        """Make the plan that a request asks for. GPUs have the server's numbers in the request and in the plan."""
        names = tuple(ask.rates_rps)
        services = [s for s in self.problem.services if s.name in ask.rates_rps]
        key = (names, ask.gpus)
        sizer = self._sizers.get(key)
        if sizer is None:
            types = tuple(self.problem.gpus.types[g] for g in ask.gpus)
            sizer = self._sizers[key] = Sizer(self.spec, replace(self.problem.gpus, types=types), services)
        rates = [ask.rates_rps[s.name] for s in services]
        headroom = self.problem.headroom
        if ask.fewest:
            return sizer.fewest([rate * headroom for rate in rates])
        start = None if ask.start is None else self._inward(ask.start, ask.gpus)
        plan = self._plan(sizer, services, rates, ask, start)
        lets = tuple(sorted((replace(x, gpu=ask.gpus[x.gpu]) for x in plan.gpulets), key=lambda x: (x.gpu, x.slot)))
        return replace(plan, gpus=len(self.problem.gpus), gpulets=lets)

    def _plan(
        self, sizer: Sizer, services: Sequence[Service], rates: Sequence[float], ask: Ask, start: ServingPlan | None
    ) -> ServingPlan:
        packer = sizer.packer(max(1, min(ask.count, len(ask.gpus))))
        headroom = self.problem.headroom
        if not ask.verify:
            plan = packer.plan([rate * headroom for rate in rates], start=start)
        else:
            known = {s.name for s in services}
            apps = [(app, x) for app, x in self.problem.applications if all(y.service.name in known for y in x)]
            true = [replace(s, rate_rps=rate) for s, rate in zip(services, rates, strict=True)]
            # the packer is copied without calling its constructor: the copy shares the packer's tables, and its
            # services get other rates
            rated = Packer.__new__(Packer)
            rated.__dict__.update(packer.__dict__)
            rated.services = true
            apps = [(replace(app, rate_rps=ask.rates_rps[x[0].service.name]), x) for app, x in apps]
            plan = plan_verified(rated, self.problem.profiles, headroom, 0.99, apps, start=start).plan
        return plan if start is None else renamed(plan, start, packer.gpus)

    def _inward(self, plan: ServingPlan, gpus: tuple[int, ...]) -> ServingPlan:
        """The plan with GPU numbers replaced by positions in the list of usable GPUs, without gpulets on other GPUs."""
        at = {gpu: i for i, gpu in enumerate(gpus)}
        return replace(plan, gpulets=tuple(replace(x, gpu=at[x.gpu]) for x in plan.gpulets if x.gpu in at))
