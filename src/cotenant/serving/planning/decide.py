"""Makes one plan for one problem, for `cotenant plan` and notebooks: packs the services, verifies the plan by
simulation, and numbers its GPUs like those of an earlier plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cotenant.core.serving import MOST_NAMED, ServingPlan
from cotenant.policy.serving.packing.planners import Packer
from cotenant.policy.serving.packing.replan import fewest_gpus, renamed
from cotenant.policy.serving.packing.specs import Spec
from cotenant.serving.config.planning import Problem
from cotenant.sim.serving.verify import Verified, plan_verified


@dataclass(frozen=True)
class Decision:
    """A plan; the result of its simulation (None: not requested); the time that packing took."""

    plan: ServingPlan
    verified: Verified | None
    target: float | None  #: fraction of requests within their SLO that a verified plan must reach
    decision_ms: float

    @property
    def unmet(self) -> str | None:
        """Say in a sentence which services get less than was requested; None if all get what they requested."""
        if self.plan.unserved is not None or self.verified is None or self.target is None:
            return self.plan.unserved
        if self.verified.holds(self.target):
            return None
        late = [name for name, part in self.verified.surely.items() if part < self.target][:MOST_NAMED]
        reached = ", ".join(f"{name} {self.verified.attainment[name]:.2%}" for name in late)
        return (
            f"simulation does not confirm that {self.target:.1%} of the requests are in time: {reached}; "
            "add GPUs or relax the SLOs"
        )


def decide(
    problem: Problem,
    spec: Spec,
    headroom: float,
    *,
    target: float | None = None,
    min_gpus: bool = False,
    start: ServingPlan | None = None,
    seed: int = 0,
    time_limit_s: float = 30.0,
    on_ready: Callable[[], None] | None = None,
) -> Decision:
    """Plan for the services' rates times `headroom`.

    With a `target` (fraction of each service's requests that must be in time), the plan is simulated. As long as
    services miss the target, the plan is made again for higher rates of these services. `min_gpus`: use as few GPUs as
    possible. `start`: the current plan, of which the new plan changes as little as possible. `on_ready()` is called
    once the input is valid, before anything is compiled. Raises InputError for an input that cannot be planned.
    """
    services, gpus = problem.services, problem.gpus
    rates = [s.rate_rps * headroom for s in services]
    Packer(spec, gpus, services)  # wrong input is reported by this line, before the slow compilation below
    if on_ready is not None:
        on_ready()
    if min_gpus:
        least = fewest_gpus(spec, gpus, services, rates, time_limit_s)
        gpus = gpus.first(least.gpus_used) if least.feasible else gpus
    packer = Packer(spec, gpus, services, time_limit_s=time_limit_s)
    # the first call builds tables and compiles code, so its time is not counted
    packer.plan(rates, start=start)
    began = time.perf_counter()
    plan = packer.plan(rates, start=start)
    decision_ms = (time.perf_counter() - began) * 1e3
    verified = None
    if target is not None and plan.feasible:
        verified = plan_verified(packer, problem.profiles, headroom, target, problem.applications, seed, start=start)
        while min_gpus and not verified.holds(target) and len(packer.gpus) < len(problem.gpus):
            packer = Packer(spec, problem.gpus.first(len(packer.gpus) + 1), services, time_limit_s=time_limit_s)
            verified = plan_verified(packer, problem.profiles, headroom, target, problem.applications, seed)
        plan = verified.plan
    if start is not None:
        plan = renamed(plan, start, packer.gpus)
    return Decision(plan, verified, target, decision_ms)
