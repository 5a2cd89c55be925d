"""Measures serving plans: what is planned, how fast, and whether simulated requests agree.

pytest -q -s bench/test_serving_bench.py
"""

from __future__ import annotations

import csv
import io
import json
import random
import re
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from cotenant.cli.plan_sets import plan_set
from cotenant.core.serving import Service
from cotenant.policy.serving.dispatch import Dispatcher, Start
from cotenant.policy.serving.packing.check import problems
from cotenant.policy.serving.packing.planners import Packer
from cotenant.policy.serving.packing.specs import PLANNERS
from cotenant.policy.serving.packing.tables import Gpus
from cotenant.profiles.serving.latency_files import load_profile
from cotenant.sim.serving import engine as serving
from cotenant.sim.serving.engine import Scenario, run
from cotenant.sim.serving.verify import plan_verified
from cotenant.workloads.requests.arrivals import Arrivals
from cotenant.workloads.requests.scenarios import SLO_MS, generate, write_scenarios

PROFILE = load_profile("RTX2080Ti")
# public planner -> (scenarios for which it claims a plan, scenarios whose plan passes the same checker as ours)
PUBLIC = {"temporal": (145, 145), "gpulet": (504, 96), "gpulet-interference": (407, 212), "exact": (471, 168)}


def judge(shared: Path, scenarios: Path, plans: Path) -> str:
    checker = shared / "reference" / "gpulet" / "check_plan.py"
    command = [sys.executable, str(checker), str(scenarios), str(plans)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]


@pytest.mark.parametrize("planner", list(PLANNERS))
@pytest.mark.parametrize("name", ["1023", "ladder"])
def test_scenarios(shared: Path, tmp_path: Path, planner: str, name: str) -> None:
    scenarios, out = shared / "reference" / "gpulet" / f"scenarios-{name}.csv", tmp_path / "plans.csv"
    text = io.StringIO()
    with redirect_stdout(text):
        plan_set(
            str(scenarios), str(shared / "reference" / "gpulet"), 4, PLANNERS[planner], 30.0, str(out), None,
            as_json=True, repeats=1 if planner == "exact" else 5,
        )  # fmt: skip
    found, verdict = json.loads(text.getvalue()), judge(shared, scenarios, out)
    ms = found["decision_ms"]
    print(f"\n{planner} on {name}: {verdict}; decision {ms['median']:.3f} ms, most {ms['max']:.2f} ms", end="")
    if name == "ladder":
        steps: dict[str, int] = defaultdict(int)
        with out.open() as file:
            for row in csv.DictReader(file):
                mix, _, step = row["scenario"].rpartition("-")
                steps[mix] = max(steps[mix], int(step))
        print(f"; steps {dict(sorted(steps.items()))}", end="")
    elif planner in PUBLIC:
        claimed, valid = PUBLIC[planner]
        mine = re.search(r"valid (\d+)", verdict)
        assert mine is not None
        print(f"; public planner: {claimed} claimed, {valid} valid: x{int(mine[1]) / valid:.2f}", end="")


def test_a_thousand_of_the_large_set(shared: Path, tmp_path: Path) -> None:
    """Nine models at 0, 100 or 200 requests/s: up to nine services on four GPUs."""
    sets = dict(generate("gpulet-19682"))
    drawn = random.Random(1).sample(sorted(sets), 1000)
    few, out = tmp_path / "few.csv", tmp_path / "plans.csv"
    with few.open("w") as file:
        write_scenarios(((name, sets[name]) for name in drawn), file)
    text = io.StringIO()
    with redirect_stdout(text):
        plan_set(
            str(few), str(shared / "reference" / "gpulet"), 4, PLANNERS["gpulet-interference"], 3.0, str(out), None,
            as_json=True,
        )  # fmt: skip
    ms = json.loads(text.getvalue())["decision_ms"]
    print(f"\n1,000 of 19,682: {judge(shared, few, out)}; decision {ms['median']:.3f} ms, most {ms['max']:.2f} ms")


def test_a_thousand_services_on_500_gpus() -> None:
    rng = np.random.default_rng(0)
    services = [
        Service(f"s{i}", m, float(rng.uniform(20, 160)), SLO_MS[m] * float(rng.uniform(1, 1.5)))
        for i, m in enumerate(rng.choice(list(PROFILE.models), 1000))
    ]
    packer = Packer(PLANNERS["gpulet-interference"], Gpus.uniform(PROFILE, 500), services)
    packer.plan()
    times = []
    for _ in range(3):
        began = time.perf_counter()
        plan = packer.plan()
        times.append(time.perf_counter() - began)
    assert plan.feasible
    assert problems(plan, services, packer.gpus) == []
    print(f"\n1,000 services: {min(times):.2f} s, {plan.gpus_used} GPUs of 500")


def test_sixty_services_under_mig() -> None:
    """Rates of 20 to 1,500 requests/s (bert 2 to 100), SLOs around those of ParvaGPU's scenario 3."""
    profile, rng = load_profile("A100-80GB"), np.random.default_rng(1)
    models = sorted(profile.models)
    slo_ms = dict(zip(models, (4294, 126, 150, 119, 282, 113, 144, 146, 138, 227, 265), strict=True))
    services = []
    for i, m in enumerate(rng.choice(models, 60).tolist()):
        rate = float(rng.uniform(2, 100) if m == "bert" else rng.uniform(20, 1500))
        services.append(Service(f"s{i}", m, rate, slo_ms[m] * float(rng.uniform(0.8, 1.5))))
    packer = Packer(PLANNERS["gpulet-interference"], Gpus.uniform(profile, 120), services, time_limit_s=60.0)
    packer.plan()
    began = time.process_time()
    plan = packer.plan()
    took = time.process_time() - began
    assert problems(plan, services, packer.gpus) == []
    least = 120 / packer.bound(np.array([s.rate_rps for s in services]))
    print(f"\n60 services under MIG: {took:.2f} s of CPU, {plan.gpus_used} GPUs, bound {least:.2f}")


def test_simulated_requests_per_second() -> None:
    """Compares requests per CPU second of the compiled loop and of the live object under a plain Python loop."""
    rates = {"lenet1": 300.0, "googlenet": 250.0, "resnet50": 250.0, "vgg16": 200.0, "ssd-mobilenetv1": 200.0}
    services = [Service(n, n, r, SLO_MS[n]) for n, r in rates.items()]
    packer = Packer(PLANNERS["gpulet-interference"], Gpus.uniform(PROFILE, 8), services)
    plan = packer.plan([r * 1.2 for r in rates.values()])
    scenario = Scenario(services, 1000.0, {"": Arrivals("poisson")}, seed=1)
    profiles = {PROFILE.gpu: PROFILE}
    run(plan, Scenario(services, 1.0, {"": Arrivals("poisson")}), profiles)
    began = time.process_time()
    result = run(plan, scenario, profiles)
    whole = time.process_time() - began
    times, what, clients = serving._arrivals(scenario)
    desk = serving.build_desk(plan, services, profiles)
    state = serving._assemble(plan, scenario, profiles, desk, times, what, clients, len(what))
    began = time.process_time()
    serving.kernel.run(state)
    loop = time.process_time() - began
    n = len(result.requests)
    rates_text = f"{n / whole / 1e6:.2f} million/s with arrivals and record, {n / loop / 1e6:.2f} in the loop"
    print(f"\n{n} requests: {rates_text}", end="")
    live = Dispatcher(plan, services, profiles)
    names = [s.name for s in services]
    pending: list[tuple[float, int]] = []
    count = 50_000
    began = time.process_time()
    for t, s in zip(times[:count], what[:count], strict=True):
        while pending and pending[0][0] <= t:
            now, let = pending.pop(0)
            _queue(pending, live.done(let, now), now)
        _queue(pending, live.request(names[s], t)[1], t)
    print(f"; live object driven from Python: {count / (time.process_time() - began):,.0f}/s")


def _queue(pending: list[tuple[float, int]], found: list[object], now: float) -> None:
    for x in found:
        if isinstance(x, Start):
            pending.append((now + x.expected_ms, x.gpulet))
            pending.sort()


@pytest.mark.parametrize("seed", range(6))
def test_simulation_agrees_with_the_plan(seed: int) -> None:
    """Random services with headroom 1.2, verified, then simulated with requests that the planner never saw."""
    rng = np.random.default_rng(seed)
    names = rng.choice(list(SLO_MS), 5, replace=False)
    services = [Service(n, n, float(rng.integers(40, 300)), SLO_MS[n]) for n in names]
    packer = Packer(PLANNERS["gpulet-interference"], Gpus.uniform(PROFILE, 10), services)
    plain = packer.plan([s.rate_rps * 1.2 for s in services])
    found = plan_verified(packer, {PROFILE.gpu: PROFILE}, 1.2, 0.99)
    out = {}
    for name, plan in (("as planned", plain), ("verified", found.plan)):
        result = run(plan, Scenario(services, 300.0, {"": Arrivals("poisson")}, seed=77 + seed), {PROFILE.gpu: PROFILE})
        rows = result.summary()["services"]
        assert isinstance(rows, dict)
        out[name] = min(rows.values(), key=lambda r: r["slo_attainment"])["slo_attainment"]
    worst = ", ".join(f"{k} {v:.2%}" for k, v in out.items())
    who = ", ".join(sorted(map(str, names)))
    print(f"\n{who}: least attainment {worst}; GPUs {plain.gpus_used} and {found.plan.gpus_used}", end="")
