"""Creates the plans that bench/gpu/serving.py serves live.

    python bench/profiles/serving_plans.py PROFILE.json OUT.json [skewed|equal]

The plans are for seven models on one GPU. The GPU time that each model needs falls as 1, 1/2, 1/3 ... ("skewed") or is
equal. Four schemes get the same requests, those of the largest load for which a planner finds a plan that keeps 99 % in
simulation. The schemes: that plan ("cotenant"), all models in turns on the whole GPU ("temporal"), a process for each
model without limits ("mps"), and a process for each model on an equal part of the GPU ("static").
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cotenant.core.serving import Gpulet, Seat, Service, ServingPlan
from cotenant.policy.serving.packing.planners import Packer
from cotenant.policy.serving.packing.specs import find_planner
from cotenant.policy.serving.packing.tables import Gpus
from cotenant.profiles.serving.latency import ServingProfile
from cotenant.profiles.serving.latency_files import profile_to_dict, read_profile
from cotenant.sim.serving.engine import Scenario, run
from cotenant.sim.serving.verify import plan_verified
from cotenant.workloads.requests.arrivals import Arrivals

SLO_MS = {
    "resnet50": 20.0, "vgg16": 25.0, "mobilenet_v2": 15.0, "densenet121": 30.0, "vit_b16": 25.0, "bert_base": 15.0,
    "bert_large": 40.0,
}  # fmt: skip
ORDER = ("resnet50", "bert_base", "vit_b16", "mobilenet_v2", "bert_large", "densenet121", "vgg16")
MAX_BATCH, EQUAL, TARGET = 32, "14%", 0.99


def base_rates(profile: ServingProfile, mix: str) -> dict[str, float]:
    """Requests per second of each model that together take all of the GPU's time in batches of 32."""
    parts = [1.0 / (k + 1) for k in range(len(ORDER))] if mix == "skewed" else [1.0] * len(ORDER)
    whole = {m: MAX_BATCH / profile.latency_ms(m, MAX_BATCH, "100%") * 1000 for m in ORDER}
    return {m: round(whole[m] * part / sum(parts), 1) for m, part in zip(ORDER, parts, strict=True)}


def services_at(rates: dict[str, float], factor: float) -> list[Service]:
    return [Service(m, m, rate * factor, SLO_MS[m]) for m, rate in rates.items()]


def best_plan(profile: ServingProfile, rates: dict[str, float]) -> tuple[float, ServingPlan]:
    """The largest factor on the rates for which a plan of any planner reaches the target in simulation, and that plan.
    Factors are tried from above in steps of 2 %, since a planner may find a plan at one load and none at a smaller
    one."""
    factor = 1.5
    while True:
        for planner in ("gpulet-interference", "gpulet", "exact"):
            packer = Packer(find_planner(planner), Gpus((profile,), (0,)), services_at(rates, factor))
            found = plan_verified(packer, {profile.gpu: profile}, 1.0, TARGET)
            if found.holds(TARGET):
                return factor, found.plan
        factor /= 1.02


def simulated_factor(profile: ServingProfile, rates: dict[str, float], plan: ServingPlan) -> float:
    """The largest factor on the rates (within 2 %) at which a plan reaches the target in simulation."""
    low, high = 0.0, 2.0
    while high - low > 0.02 * high:
        factor = (low + high) / 2
        scenario = Scenario(services_at(rates, factor), 30.0, {"": Arrivals("poisson")}, seed=1)
        rows: dict[str, Any] = run(plan, scenario, {profile.gpu: profile}).summary()["services"]  # type: ignore[assignment]
        if min(x["slo_attainment"] for x in rows.values()) >= TARGET:
            low = factor
        else:
            high = factor
    return low


def let(profile: ServingProfile, label: str, slot: int, models: list[str]) -> Gpulet:
    seats = tuple(Seat(m, m, MAX_BATCH, 1.0) for m in models)
    return Gpulet(0, profile.gpu, label, float(label[:-1]), slot, 100.0, seats)


def main(path: str, out: str, mix: str = "skewed") -> None:
    profile = read_profile(Path(path))
    rates = base_rates(profile, mix)
    factor, plan = best_plan(profile, rates)
    schemes = {
        "cotenant": plan,
        "temporal": ServingPlan("temporal", 1, (let(profile, "100%", 0, list(rates)),)),
        "static": ServingPlan("static", 1, tuple(let(profile, EQUAL, i, [m]) for i, m in enumerate(rates))),
        "mps": ServingPlan("mps", 1, tuple(let(profile, "100%", i, [m]) for i, m in enumerate(rates))),
    }
    content: dict[str, Any] = {
        "profile": profile_to_dict(profile),
        "services": [{"name": m, "model": m, "rate_rps": r, "slo_ms": SLO_MS[m]} for m, r in rates.items()],
        "schemes": {},
    }
    for name, found in schemes.items():
        first = simulated_factor(profile, rates, found) if name != "mps" else factor * 0.8
        content["schemes"][name] = {
            "gpulets": found.to_dict()["gpulets"],
            "first_factor": round(first, 4),
            "blind": name in ("temporal", "mps"),  # these planners know nothing of a model's neighbours
            "simulated_factor": round(first, 4) if name != "mps" else None,
        }
        print(name, round(first, 3), [(g.partition, [(s.service, s.batch) for s in g.seats]) for g in found.gpulets])
    content["schemes"]["cotenant"]["planned_factor"] = round(factor * 0.9, 4)
    Path(out).write_text(json.dumps(content, indent=1) + "\n")
    print("rates at x1:", rates, "plan for", round(factor, 3))


if __name__ == "__main__":
    main(*sys.argv[1:4])
