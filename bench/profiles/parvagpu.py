"""Makes a serving profile from ParvaGPU's public measurements, and compares its planner with ours on its own scenarios.

    git clone https://github.com/MunQ-Lee/ParvaGPU_SC24 PARVA && make -C PARVA
    python bench/profiles/parvagpu.py profile PARVA src/cotenant/profiles/data/serving-a100-80gb.json
    python bench/profiles/parvagpu.py compare PARVA

`compare` runs PARVA/parva_sched on each of its scenarios, reads and checks the plan that it writes, and simulates
Poisson requests on it and on our plans. If the linker finds `num_files` twice, build with CFLAGS="-Iinc -fcommon".
"""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cotenant.core.serving import Gpulet, Seat, Service, ServingPlan
from cotenant.policy.serving.packing.check import problems
from cotenant.policy.serving.packing.planners import Packer
from cotenant.policy.serving.packing.replan import Sizer
from cotenant.policy.serving.packing.specs import DEFAULT_PLANNER, find_planner
from cotenant.policy.serving.packing.tables import Gpus
from cotenant.profiles.serving.latency import ServingProfile
from cotenant.profiles.serving.latency_files import load_profile
from cotenant.profiles.serving.mig_layout import starts
from cotenant.sim.serving.engine import Scenario, run
from cotenant.sim.serving.verify import plan_verified
from cotenant.workloads.requests.arrivals import Arrivals

GPU = "A100-80GB"
SLOTS = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}  # compute slices of a MIG instance -> its memory slots
PROCESSES = 3  # the number of processes that ParvaGPU's planner uses
# parameters in millions, four bytes each: torchvision's tables; bert with the sizes of scripts/bert/large.json
PARAMETERS_M = {
    "bert": 335.1, "densenet121": 8.0, "densenet169": 14.1, "densenet201": 20.0, "inceptionv3": 27.2,
    "mobilenetv2": 3.5, "resnet101": 44.5, "resnet152": 60.2, "resnet50": 25.6, "vgg16": 138.4, "vgg19": 143.7,
}  # fmt: skip
SOURCE = (
    "ParvaGPU (SC'24), github.com/MunQ-Lee/ParvaGPU_SC24 at 5f3de1e, prof_data/*.csv, MIT: 11 models in fp32 on one "
    "A100 80GB under MIG, 1 to 3 MPS processes an instance. Time of a batch: batch / throughput of a process; sizes "
    "that ran out of memory are absent. Memory: parameters only, since what else a batch takes fitted "
    "wherever a time stands"
)
DURATION_S, TARGET = 60.0, 0.99
QUEUE = 30_000  # number of requests that may wait; it is large, because some SLOs leave time for several thousand
# ParvaGPU plans for latencies below 0.9 times half the SLO, and our plans without verification do so here, too
SLO_FACTOR = 0.9


def label(slices: int, processes: int) -> str:
    return f"{slices}g" if processes == 1 else f"{slices}gx{processes}"


def profile_of(parva: Path) -> dict[str, Any]:
    """ParvaGPU's tables as a profile in our format."""
    partitions: dict[str, Any] = {}
    for slices, slots in SLOTS.items():
        partitions[label(slices, 1)] = {"fraction": round(slices / 7, 6), "slots": slots}
        for n in range(2, PROCESSES + 1):
            partitions[label(slices, n)] = {"of": label(slices, 1), "processes": n}
    models = {}
    for name, parameters in PARAMETERS_M.items():
        latency: dict[str, dict[str, float]] = {}
        with (parva / "prof_data" / f"{name}.csv").open() as file:
            for row in csv.DictReader(file):
                slices, batch, n = (int(row[k]) for k in ("Mig instance", "Batch size", "Workload Number"))
                rate = float(row["Throughput"])
                if n <= PROCESSES and rate > 0:
                    latency.setdefault(label(slices, n), {})[str(batch)] = round(1000 * batch / rate, 4)
        models[name] = {"memory_mb": round(parameters * 4), "latency_ms": latency}
    return {
        "gpu": GPU, "source": SOURCE, "memory_mb": 85899, "usable": 0.95, "max_gpulets": 7 * PROCESSES, "margin": 1.0,
        "slots": 8, "partitions": partitions, "models": models,
    }  # fmt: skip


def write_profile(parva: Path, out: Path) -> None:
    content = profile_of(parva)
    models = content.pop("models")
    head = json.dumps(content, indent=1).removesuffix("\n}")
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(model)}" for name, model in models.items())
    out.write_text(f'{head},\n "models": {{\n{rows}\n }}\n}}\n')


SCENARIOS = range(1, 7)


def scenarios(parva: Path) -> list[list[Service]]:
    """Services of each of ParvaGPU's scenarios. SLOs and rates are in two tables, with a column per model in its
    order."""
    out = []
    tables = [(parva / "SLO" / f"SLO_{name}.csv").read_text().split() for name in ("req_rate", "latency")]
    for rates, slos in zip(*tables, strict=True):
        cells = zip(sorted(PARAMETERS_M), rates.split(","), slos.split(","), strict=True)
        # the public code reads both numbers with atoi, which cuts decimals off
        out.append(
            [Service(m, m, float(int(r)), float(int(float(slo))), max_queue=QUEUE) for m, r, slo in cells if r != "N/A"]
        )
    return out


def public_plan(parva: Path, number: int, profile: ServingProfile, services: list[Service]) -> ServingPlan:
    """The plan that ParvaGPU's planner writes for a scenario, with legal placements for its instances."""
    subprocess.run(["./parva_sched", str(number)], cwd=parva, check=True, capture_output=True)
    by_gpu: dict[int, list[tuple[str, int, int, int]]] = {}
    with (parva / "deployment" / f"SLO{number}" / f"SLO{number}_ParvaGPU_deploy.csv").open() as file:
        for row in csv.DictReader(file):
            node, gpu, slices, batch, n = (
                int(row[k]) for k in ("Num instance", "Num GPU", "Instance size", "Batch size", "Num proc")
            )
            by_gpu.setdefault(8 * node + gpu, []).append((row["Model"], slices, batch, n))
    lets: list[Gpulet] = []
    for at, segments in enumerate(by_gpu.values()):
        places = starts(profile, [f"{slices}g" for _, slices, _, _ in segments])
        for (model, slices, batch, n), place in zip(segments, places, strict=True):
            size = profile.partition(label(slices, n))
            ms = profile.effective_ms(model, batch, size.label)
            for _ in range(n):
                seats = (Seat(model, model, batch, 0.0),)
                lets.append(Gpulet(at, profile.gpu, size.label, size.percent, len(lets), ms, seats, place))
    return ServingPlan("parvagpu", len(by_gpu), tuple(lets), rates_rps={s.name: s.rate_rps for s in services})


def compliance(plan: ServingPlan, services: list[Service], profile: ServingProfile, seed: int) -> tuple[float, float]:
    """Simulate Poisson requests at the scenario's rates. Returns the fraction of all requests in time, and that of the
    worst service."""
    found = run(plan, Scenario(services, DURATION_S, {"": Arrivals("poisson")}, seed=seed), {profile.gpu: profile})
    rows: dict[str, Any] = found.summary()["services"]  # type: ignore[assignment]
    sent = sum(r["sent"] for r in rows.values())
    return sum(r["slo_attainment"] * r["sent"] for r in rows.values()) / sent, min(
        r["slo_attainment"] for r in rows.values()
    )


def compare(parva: Path) -> None:
    profile = load_profile(GPU)
    spec = find_planner(DEFAULT_PLANNER)
    print("| scenario | services | requests/s | bound | planner | GPUs | in time | worst | does not hold | s of CPU |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for number, services in zip(SCENARIOS, scenarios(parva), strict=True):
        theirs = public_plan(parva, number, profile, services)
        gpus = Gpus.uniform(profile, theirs.gpus_used * 2)
        tight = [replace(s, slo_ms=s.slo_ms * SLO_FACTOR) for s in services]
        rates = [s.rate_rps for s in services]
        sizer = Sizer(spec, gpus, tight, time_limit_s=120.0)
        sizer.fewest(rates)  # a first call without measurement compiles code and builds tables
        began = time.process_time()
        ours = sizer.fewest(rates)
        took = time.process_time() - began
        bound = math.ceil(len(gpus) / sizer.packer(len(gpus)).bound(np.array(rates)) - 1e-9)
        rows = [("ParvaGPU", theirs, 0.0), ("ours", ours, took)]
        began = time.process_time()
        for count in range(ours.gpus_used, len(gpus)):
            found = plan_verified(
                Packer(spec, gpus.first(count), services, time_limit_s=120.0), {GPU: profile}, 1.0, TARGET
            )
            if found.holds(TARGET):
                break
        rows.append(("ours, verified", found.plan, time.process_time() - began))
        for name, plan, seconds in rows:
            whole, worst = compliance(plan, services, profile, seed=77)
            wrong = len(problems(plan, services, gpus))
            head = f"| S{number} | {len(services)} | {sum(rates):,.0f} | {bound} | {name} | {plan.gpus_used}"
            print(f"{head} | {whole:.2%} | {worst:.2%} | {wrong} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "profile":
        write_profile(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        compare(Path(sys.argv[2]))
