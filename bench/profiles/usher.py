"""Compares Usher (OSDI'24) with our planners: GPUs needed, and requests in time.

    python bench/profiles/usher.py

Usher's public code (github.com/ss7krd/Usher at 6e1037d) cannot be run, because it has blanks in place of requirements
and times. `heuristic` is its placement, written from the paper, with the numbers of the public code: groups of four
models, and batches that are powers of two. A replica of a model needs the SMs that its batch can use and the memory of
the model. Replicas never get less, so models do not share SMs. Groups join models that need more SMs than memory with
models that need more memory than SMs. For a group, every combination of batches is placed, the largest replicas first,
each on the GPU that it leaves fullest. The combination that needs the fewest GPUs is kept. Usher also merges the
operators of models on one GPU, which is left out here.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from parvagpu import TARGET, compliance

from cotenant.core.serving import Gpulet, Seat, Service, ServingPlan
from cotenant.policy.serving.packing.check import problems
from cotenant.policy.serving.packing.planners import Packer
from cotenant.policy.serving.packing.replan import Sizer
from cotenant.policy.serving.packing.specs import DEFAULT_PLANNER, find_planner
from cotenant.policy.serving.packing.tables import FULL_SPEED, Gpus
from cotenant.profiles.serving.latency import ServingProfile
from cotenant.profiles.serving.latency_files import load_profile
from cotenant.sim.serving.verify import plan_verified
from cotenant.workloads.requests.scenarios import generate

GROUP = 4
BATCHES = (1, 2, 4, 8, 16, 32)
# mix -> largest step of it that four GPUs can serve
STEPS = {"equal": 31, "scen1": 13, "scen2": 56, "scen3": 58, "scen4": 44, "scen5": 45}
TIMES = 4
H200_LOADS = (0.45, 0.9, 1.8)  # loads of each model: factors on its part of a GPU's time at batches of 32


@dataclass(frozen=True)
class Replica:
    """One process of a service: its batch, its part of the SMs and of the memory, and its requests per second."""

    service: str
    batch: int
    partition: str
    compute: float
    memory: float
    rps: float
    ms: float


def choices(service: Service, profile: ServingProfile) -> list[list[Replica]]:
    """The replicas that serve all of a service's rate, for each batch that keeps the SLO."""
    found = []
    whole = max(profile.partitions, key=lambda p: p.fraction)
    memory = profile.model(service.model).memory_bytes + profile.per_gpulet_bytes
    for batch in BATCHES:
        if batch > profile.max_batch(service.model, whole.label):
            continue
        fast = profile.latency_ms(service.model, batch, whole.label)
        need = min(
            (p for p in profile.partitions if profile.latency_ms(service.model, batch, p.label) <= fast * FULL_SPEED),
            key=lambda p: p.fraction,
        )
        ms = profile.effective_ms(service.model, batch, need.label)
        if 2 * ms <= service.slo_ms:
            rps = batch * 1000 / ms
            each = Replica(
                service.name, batch, need.label, need.fraction, memory / profile.planned_memory_bytes(), rps, ms
            )
            found.append([each] * math.ceil(service.rate_rps / rps))
    return found


def groups(services: list[Service], profile: ServingProfile) -> list[list[Service]]:
    """Divide models into groups. In each group, half of the models need more SMs than memory, compared with the
    others."""

    def lean(service: Service) -> float:
        replicas = min(choices(service, profile), key=lambda x: sum(r.compute + r.memory for r in x))
        return sum(r.compute - r.memory for r in replicas)

    order = sorted(services, key=lean)
    out = []
    while order:
        half = min(GROUP, len(order)) // 2
        group = order[:half] + order[len(order) - (min(GROUP, len(order)) - half) :]
        order = [s for s in order if s not in group]
        out.append(group)
    return out


def place(replicas: list[Replica], gpus: list[list[Replica]], own: set[int], most: int) -> list[list[Replica]]:
    """The GPUs with these replicas added, the group's own GPUs first."""
    gpus, own = [list(x) for x in gpus], set(own)
    for replica in sorted(replicas, key=lambda r: -(r.compute + r.memory)):
        fits = [
            (g not in own, sum(1 - r.compute - r.memory for r in gpus[g]), g) for g in range(len(gpus))
            if len(gpus[g]) < most and sum(r.compute for r in gpus[g]) + replica.compute <= 1 + 1e-9
            and sum(r.memory for r in gpus[g]) + replica.memory <= 1 + 1e-9
        ]  # fmt: skip
        if fits:
            g = min(fits, key=lambda f: (f[0], -sum(r.compute + r.memory for r in gpus[f[2]]), f[2]))[2]
        else:
            g = len(gpus)
            gpus.append([])
        own.add(g)
        gpus[g].append(replica)
    return gpus


def heuristic(services: list[Service], profile: ServingProfile) -> ServingPlan:
    """Usher's plan, on as many GPUs as it takes."""
    gpus: list[list[Replica]] = []
    for group in groups(services, profile):
        options = [choices(s, profile) for s in group]
        tried = (
            place([r for x in combination for r in x], gpus, set(), profile.max_gpulets)
            for combination in itertools.product(*options)
        )
        gpus = min(tried, key=lambda x: (len(x), sum(r.compute for g in x for r in g)))
    lets = []
    for g, replicas in enumerate(gpus):
        for slot, r in enumerate(replicas):
            seat = Seat(r.service, next(s.model for s in services if s.name == r.service), r.batch, 0.0)
            part = profile.partition(r.partition)
            lets.append(Gpulet(g, profile.gpu, r.partition, part.percent, slot, r.ms, (seat,)))
    return ServingPlan("usher's", len(gpus), tuple(lets), rates_rps={s.name: s.rate_rps for s in services})


def scenarios() -> list[tuple[str, ServingProfile, list[Service]]]:
    """The scenarios: mixes of the gpulet paper at four times the load that four GPUs serve, and seven models on an
    H200."""
    out = []
    ladder, old = dict(generate("ladder")), load_profile("RTX2080Ti")
    for mix, step in STEPS.items():
        rows = ladder[f"{mix}-{step:03d}"]
        out.append((mix, old, [Service(m, m, r * TIMES, slo) for m, r, slo in rows]))
    new = load_profile("H200")
    for load in H200_LOADS:
        services = []
        for name in new.models:
            ms = new.effective_ms(name, 32, "100%")
            services.append(Service(name, name, load * 32000 / ms / 2, 4 * ms))
        out.append((f"H200 {load:g}", new, services))
    return out


def main() -> None:
    print("| scenario | requests/s | bound | planner | GPUs | in time | worst | does not hold |")
    print("|---|---|---|---|---|---|---|---|")
    for name, profile, services in scenarios():
        theirs = heuristic(services, profile)
        gpus = Gpus.uniform(profile, 2 * theirs.gpus_used)
        rates = [s.rate_rps for s in services]
        rows = [("Usher's heuristic", theirs)]
        for planner in ("usher", DEFAULT_PLANNER):
            sizer = Sizer(find_planner(planner), gpus, services, time_limit_s=60.0)
            rows.append((planner, sizer.fewest(rates)))
        bound = math.ceil(len(gpus) / sizer.packer(len(gpus)).bound(np.array(rates)) - 1e-9)
        spec = find_planner(DEFAULT_PLANNER)
        for count in range(bound, len(gpus)):
            packer = Packer(spec, Gpus.uniform(profile, count), services, time_limit_s=60.0)
            found = plan_verified(packer, {profile.gpu: profile}, 1.0, TARGET)
            if found.holds(TARGET):
                break
        rows.append((f"{DEFAULT_PLANNER}, verified", found.plan))
        for label, plan in rows:
            whole, worst = compliance(plan, services, profile, seed=77) if plan.feasible else (math.nan, math.nan)
            wrong = len(problems(plan, services, gpus))
            head = f"| {name} | {sum(rates):,.0f} | {bound} | {label} | {plan.gpus_used}"
            print(f"{head} | {whole:.2%} | {worst:.2%} | {wrong} |", flush=True)


if __name__ == "__main__":
    main()
