"""Serving plans that are verified by simulation: a plan is made and simulated, and services whose requests were late
are planned again for higher rates.

Planners assume steady arrivals. Random arrivals come in bursts, and a plan that sustains the mean rate can still be
late too often, especially if single requests take a large part of the SLO. So the planning rate of each service gets a
factor that grows until simulated Poisson requests at the true rate keep the SLO.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cotenant.core.serving import Application, ServingPlan
from cotenant.policy.serving.packing.applications import Stage
from cotenant.policy.serving.packing.planners import Packer
from cotenant.profiles.serving.latency import ServingProfile
from cotenant.sim.serving.engine import Scenario, run
from cotenant.workloads.requests.arrivals import Arrivals

GROWTH = 1.12
ROUNDS = 24
# The simulated time is such that the service with the lowest rate gets this many requests. An SLO attainment of 99 %
# then means 40 late requests, enough for an estimate. But the time is at least SHORTEST_S and at most LONGEST_S.
REQUESTS = 4000
SHORTEST_S, LONGEST_S = 30.0, 600.0


@dataclass(frozen=True)
class Verified:
    """A serving plan, and for each service: the simulated SLO attainment, its lower confidence bound (`surely`), and
    the factor by which the true rate was multiplied to get the rate for which the service was planned.
    """

    plan: ServingPlan
    attainment: dict[str, float]
    surely: dict[str, float]
    factors: dict[str, float]
    rounds: int

    def holds(self, target: float) -> bool:
        """Whether the plan serves all services and the lower bound of each service's SLO attainment reaches the target.
        """
        return self.plan.feasible and all(a >= target for a in self.surely.values())


def plan_verified(
    packer: Packer, profiles: Mapping[str, ServingProfile], headroom: float, target: float,
    applications: Sequence[tuple[Application, Sequence[Stage]]] = (), seed: int = 0, start: ServingPlan | None = None,
) -> Verified:  # fmt: skip
    """Plan the services of `packer` for `headroom` times their rates, and for more until the simulated attainment
    reaches `target`. Best-effort services have no SLO to keep. If a larger rate no longer fits, returns the last plan
    that served all services, with the attainment that it reached."""
    services = packer.services
    staged = {stage.service.name for _, stages in applications for stage in stages}
    own = [s for s in services if s.name not in staged]
    least = min(s.rate_rps for s in services)
    duration = min(LONGEST_S, max(SHORTEST_S, REQUESTS / least))
    factors = {s.name: headroom for s in services}
    best: Verified | None = None
    for round_ in range(1, ROUNDS + 1):
        plan = packer.plan([s.rate_rps * factors[s.name] for s in services], start=start)
        if not plan.feasible:
            return best or Verified(plan, {}, {}, factors, round_)
        scenario = Scenario(own, duration, {"": Arrivals("poisson")}, applications, seed=seed + round_)
        keys = run(plan, scenario, profiles).summary()["services"]
        assert isinstance(keys, dict)
        judged = [s.name for s in services if s.latency_sensitive]
        reached = {name: keys[name]["slo_attainment"] or 0.0 for name in judged}
        surely = {name: _less_chance(reached[name], keys[name]["sent"]) for name in judged}
        now = Verified(plan, reached, surely, dict(factors), round_)
        if best is None or min(surely.values(), default=1.0) >= min(best.surely.values(), default=1.0):
            best = now
        short = [name for name, a in surely.items() if a < target]
        if not short:
            return now
        for name in short:
            factors[name] *= GROWTH
    assert best is not None
    return best


def _less_chance(share: float, requests: int) -> float:
    """Return a lower bound of the fraction of requests that keep the SLO: three standard errors below the simulated
    fraction `share`. Late requests come in groups, so two would be too few.
    """
    return share - 3.0 * math.sqrt(max(0.0, share * (1.0 - share)) / max(1, requests))
