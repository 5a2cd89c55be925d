"""Whatever a services file, a profile or a plan holds, the answer is a result or one sentence, never a traceback."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from cotenant.core.errors import InputError
from cotenant.core.serving import Service, ServingPlan
from cotenant.policy.serving.dispatch import Dispatcher
from cotenant.policy.serving.packing.planners import Packer
from cotenant.policy.serving.packing.specs import PLANNERS
from cotenant.policy.serving.packing.tables import Gpus
from cotenant.profiles.serving.latency_files import load_profile, parse_profile, profile_to_dict
from cotenant.serving.config.planning import build_problem
from cotenant.serving.config.services import parse_services

VALUES: list[Any] = [
    None, 0, -1, 1e308, float("nan"), float("inf"), "", "x", "120%", "0%", [], {}, [1], {"a": 1}, True, 10**30, "nan",
    "-5", "mig", "time", ["20%", "20%"], ["x"], {"count": 1},
]  # fmt: skip
SERVICES = """
gpus: {count: 2, model: RTX2080Ti}
mechanism: mps
partitions: [20%, 50%, 100%]
max_gpulets: 2
replan: {period: 20s, headroom: 1.2}
services:
  - {name: a, model: models/resnet50, rate_rps: 20, slo_ms: 108, class: best-effort, memory: 1GiB, max_queue: 9}
applications:
  - {name: t, graph: {ssd-mobilenetv1: [googlenet]}, rate_rps: 5, slo_ms: 400}
"""


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from places(value, (*at, key))


def mutants(tree: Any, count: int) -> Iterator[Any]:
    rng = random.Random(7)
    for _ in range(count):
        new = copy.deepcopy(tree)
        for _ in range(rng.choice((1, 1, 2))):
            *path, last = rng.choice([p for p in places(new) if p])
            holder = new
            for key in path:
                holder = holder[key]
            if rng.random() < 0.8:
                holder[last] = copy.deepcopy(rng.choice(VALUES))
            else:
                del holder[last]
        yield new


def counted(tree: Any, count: int, use: Callable[[Any], object]) -> int:
    said = []
    for mutant in mutants(tree, count):
        try:
            use(mutant)
        except InputError as error:
            said.append(str(error))
    assert not any("\n" in text for text in said)
    return len(said)


def test_services_files() -> None:
    def use(data: Any) -> None:
        deployment = parse_services(data)
        if len(deployment.gpu_models) <= 100:
            problem = build_problem(deployment)
            Packer(PLANNERS["greedy"], problem.gpus, problem.services)

    assert 150 < counted(yaml.safe_load(SERVICES), 400, use) < 400


def test_profiles() -> None:
    whole = json.loads(json.dumps(profile_to_dict(load_profile("RTX2080Ti"))))
    whole["models"] = {"bert": whole["models"]["bert"]}
    assert 150 < counted(whole, 400, lambda data: parse_profile(data, "p.json")) < 400


def test_plans() -> None:
    profile = load_profile("RTX2080Ti")
    services = [Service("resnet50", "resnet50", 50.0, 108.0), Service("bert", "bert", 20.0, 22.0)]
    plan = Packer(PLANNERS["greedy"], Gpus.uniform(profile, 2), services).plan()
    tree = json.loads(json.dumps(plan.to_dict()))

    def use(data: Any) -> None:
        Dispatcher(ServingPlan.from_dict(data), services, {profile.gpu: profile})

    assert 100 < counted(tree, 400, use) < 400


@pytest.mark.parametrize("data", [None, 3, [], {}, "x"])
def test_nothing_at_all(data: Any) -> None:
    with pytest.raises(InputError):
        parse_profile(data, "p.json")
    with pytest.raises(InputError):
        parse_services(data if isinstance(data, dict) else {"services": data})
    with pytest.raises(InputError):
        ServingPlan.from_dict(data)
