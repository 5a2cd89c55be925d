"""Many small models: as many on a gpulet as their SLOs allow, and the limit by its name where one does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cotenant.core.serving import Service, ServingPlan
from cotenant.policy.serving.packing.check import problems
from cotenant.policy.serving.packing.planners import Packer
from cotenant.policy.serving.packing.specs import PLANNERS
from cotenant.policy.serving.packing.tables import Gpus
from cotenant.profiles.serving.latency_files import parse_profile
from cotenant.serving.config.planning import build_problem
from cotenant.serving.config.services import parse_services

LATENCY = {"50%": {"1": 0.4, "8": 1.2}, "100%": {"1": 0.3, "8": 0.9}}


def profile(models: int, **more: Any) -> dict[str, Any]:
    made = {f"m{i}": {"memory_mb": 10, "latency_ms": LATENCY} for i in range(models)}
    return {
        "gpu": "cpu", "source": "made up", "memory_mb": 16_000, "max_gpulets": 2,
        "partitions": {"50%": 0.5, "100%": 1.0}, "models": made, **more,
    }  # fmt: skip


def planned(
    count: int, slo_ms: float, rates: list[float], planner: str = "gpulet-interference", crowd: int = 128, **more: Any
) -> ServingPlan:
    gpus = Gpus.uniform(parse_profile(profile(count, **more), "made up"), 1)
    services = [Service(f"m{i}", f"m{i}", rates[i], slo_ms) for i in range(count)]
    spec = PLANNERS[planner]
    found = Packer(replace(spec, rules=replace(spec.rules, crowd=crowd)), gpus, services).plan()
    assert problems(found, services, gpus) == []
    return found


@pytest.mark.parametrize("planner", ["temporal", "gpulet", "gpulet-interference", "exact"])
def test_ten_models_with_a_request_a_second_fit_two_cores(planner: str) -> None:
    rates = [0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4]
    found = planned(10, 100.0, rates, planner)
    assert found.feasible
    assert sorted(s.service for let in found.gpulets for s in let.seats) == sorted(f"m{i}" for i in range(10))


@pytest.mark.parametrize("planner", ["temporal", "gpulet", "gpulet-interference"])
def test_small_gpulets_leave_nothing_out_that_a_whole_gpu_serves(planner: str) -> None:
    """On two gpulets of 10 % only four of these models can take turns; on the whole GPU all seven can."""
    times = {
        f"{p}%": {str(b): one * (0.7 + 0.3 * b) / (p / 100) ** 0.9 for b in (1, 2, 4, 8, 16, 32)}
        for one in (1.0,) for p in (10, 20, 50, 100)
    }  # fmt: skip
    ones = (8, 10, 12, 16, 20, 26, 32)
    made = {
        f"m{i}": {"memory_mb": 10, "latency_ms": {p: {b: t * one for b, t in row.items()} for p, row in times.items()}}
        for i, one in enumerate(ones)
    }
    content = profile(0) | {"models": made, "partitions": {p: int(p[:-1]) / 100 for p in times}}
    gpus = Gpus.uniform(parse_profile(content, "made up"), 1)
    services = [Service(f"m{i}", f"m{i}", 14.0 / (i + 1) / one * 8, 60.0 * one) for i, one in enumerate(ones)]
    found = Packer(PLANNERS[planner], gpus, services).plan()
    assert problems(found, services, gpus) == []
    assert found.planner == planner
    assert found.feasible


def test_a_hundred_models_with_a_request_a_second_fit_one_gpu() -> None:
    found = planned(100, 500.0, [1.0] * 100)
    assert found.feasible
    assert found.gpus_used == 1


def test_an_older_plan_with_many_models_is_kept() -> None:
    gpus = Gpus.uniform(parse_profile(profile(10), "made up"), 1)
    services = [Service(f"m{i}", f"m{i}", 1.0, 100.0) for i in range(10)]
    packer = Packer(PLANNERS["gpulet-interference"], gpus, services)
    first = packer.plan()
    again = packer.plan([2.0] * 10, start=first)
    assert again.feasible
    assert [(x.partition, {s.service for s in x.seats}) for x in again.gpulets] == [
        (x.partition, {s.service for s in x.seats}) for x in first.gpulets
    ]


def test_the_limit_is_named() -> None:
    few = planned(10, 100.0, [1.0] * 10, crowd=4)
    assert [len(x.seats) for x in few.gpulets] == [4, 4]
    assert {x.reason for x in few.left_out} == {
        "every gpulet has 4 models, the most that it may (max_models), and there is no room for another gpulet"
    }
    one = planned(3, 100.0, [1.0] * 3, "greedy")
    assert {x.reason for x in one.left_out} == {
        "every gpulet has its one model, and there is no room for another gpulet"
    }
    # Eight batches of 0.4 ms, twice, take 6.4 ms. Nine, twice, take more than the SLO of 7 ms.
    tight = planned(20, 7.0, [1.0] * 20)
    assert [len(x.seats) for x in tight.gpulets] == [8, 8]
    assert {x.reason for x in tight.left_out} == {
        "no gpulet, existing or new, would keep both the service's SLO and its neighbours' SLOs"
    }
    full = planned(4, 100.0, [1.0] * 4, memory_mb=35)
    assert {x.reason for x in full.left_out} == {
        "the service needs 10 MB of GPU memory, and no GPU has more than 5 MB left"
    }


def test_max_models_of_the_file_holds(tmp_path: Path) -> None:
    import json

    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile(10)))
    services = [{"name": f"m{i}", "rate_rps": 1, "slo_ms": 100} for i in range(10)]
    content = {"gpus": {"count": 1, "model": "cpu"}, "profile": str(path), "services": services}
    for limit, seats in ((2, [2, 2]), (None, [10])):
        problem = build_problem(parse_services(content | ({} if limit is None else {"max_models": limit})))
        found = Packer(problem.planner(), problem.gpus, problem.services).plan()
        assert [len(x.seats) for x in found.gpulets] == seats
