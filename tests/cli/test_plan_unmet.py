"""Plans that serve less than was requested: what a script sees of them."""

from __future__ import annotations

import json
from pathlib import Path

from command import cotenant

from cotenant.core.serving import ServingPlan
from cotenant.serving.planning.decide import Decision
from cotenant.sim.serving.verify import Verified

SERVICES = """
gpus: {count: 4, model: RTX2080Ti}
mechanism: mps
services:
  - {name: cats, model: models/resnet50, rate_rps: 100, slo_ms: 108}
  - {name: words, model: bert, rate_rps: 60, slo_ms: 22, class: latency-sensitive}
applications:
  - {name: traffic, graph: {ssd-mobilenetv1: [googlenet, vgg16]}, rate_rps: 40, slo_ms: 400}
"""


def run(*args: object) -> tuple[int, str, str]:
    found = cotenant(*args)
    return found.code, found.out, found.err


def test_a_script_sees_what_a_plan_does_not_serve(tmp_path: Path) -> None:
    """A result that falls short of the request is printed, and the command fails with a sentence that says so."""
    services = tmp_path / "services.yaml"
    services.write_text(SERVICES)
    code, out, err = run("plan", services, "--gpus", 1, "--what-if", "rate.words=5000", "--no-verify")
    assert code == 1
    assert err.splitlines()[-1] == "cotenant: the plan does not serve all requests of 1 of 5 services: words"
    assert "not planned:" in out
    code, out, err = run(
        "simulate", services, "--gpus", 1, "--no-verify", "--duration", "2s", "--json", "--planner", "temporal"
    )  # fmt: skip
    assert code == 1
    assert err.splitlines()[-1].startswith("cotenant: the plan does not serve all requests of ")
    assert json.loads(out)["requests"] > 0
    plan = tmp_path / "plan.json"
    run("plan", services, "--gpus", 1, "--planner", "temporal", "--no-verify", "--out", plan)
    # a plan that was not verified is simulated as it is
    assert run("simulate", services, "--plan", plan, "--duration", "2s", "--json")[0] == 0
    verified = Verified(ServingPlan("p", 1, ()), {"a": 0.995, "b": 1.0}, {"a": 0.985, "b": 1.0}, {}, 1)
    assert Decision(verified.plan, verified, 0.98, 1.0).unmet is None
    assert Decision(verified.plan, verified, 0.99, 1.0).unmet == (
        "simulation does not confirm that 99.0% of the requests are in time: a 99.50%; add GPUs or relax the SLOs"
    )
    rates = tmp_path / "rates.csv"
    rates.write_text("time_s,cats\n" + "".join(f"{t},90000\n" for t in range(0, 200, 2)))
    code, out, err = run("plan", services, "--autoscale", rates, "--json")
    assert (code, {row["needed"] for row in json.loads(out)["decisions"]}) == (1, {None})
    assert err.splitlines()[-1] == "cotenant: in 9 periods of 9 the services needed more than all 4 GPUs"
