"""Plans for the public scenarios, judged by the independent checker beside the checkout."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from cotenant.cli.plan_sets import plan_set
from cotenant.policy.serving.packing.specs import PLANNERS
from cotenant.workloads.requests.scenarios import generate, read_scenarios, write_scenarios

# The last step at which the public planners with their shipped options succeed; they succeed at all steps before it.
PUBLIC_STEPS = {"equal": 27, "scen1": 9, "scen2": 52, "scen3": 52, "scen4": 39, "scen5": 39}


def judged(shared: Path, scenarios: Path, plans: Path) -> tuple[int, int]:
    """(valid, claimed) as the checker counts them."""
    checker = shared / "reference" / "gpulet" / "check_plan.py"
    command = [sys.executable, str(checker), str(scenarios), str(plans)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = re.search(r"valid (\d+) of \d+ \(claimed (\d+)\)", run.stdout)
    assert found is not None
    return int(found[1]), int(found[2])


def plan(shared: Path, name: str, planner: str, folder: Path) -> tuple[Path, Path]:
    scenarios, out = shared / "reference" / "gpulet" / f"scenarios-{name}.csv", folder / "plans.csv"
    plan_set(
        str(scenarios), str(shared / "reference" / "gpulet"), 4, PLANNERS[planner], 1.0, str(out), None, as_json=True
    )
    return scenarios, out


@pytest.mark.parametrize(("planner", "least"), [("gpulet-interference", 610), ("temporal", 200)])
def test_combinations(shared: Path, tmp_path: Path, planner: str, least: int) -> None:
    valid, claimed = judged(shared, *plan(shared, "1023", planner, tmp_path))
    assert valid == claimed
    assert valid >= least


@pytest.mark.parametrize("planner", ["gpulet-interference", "gpulet", "temporal"])
def test_eight_models_with_a_request_a_second_fit_one_gpu(shared: Path, tmp_path: Path, planner: str) -> None:
    """More than the three of the usual search share a gpulet, and the checker agrees."""
    scenarios, out = tmp_path / "many.csv", tmp_path / "plans.csv"
    models = [*(f"lenet{i}" for i in range(1, 7)), "ssd-mobilenetv1", "googlenet"]
    rows = "".join(f"many,{model},1,500\n" for model in models)
    scenarios.write_text(f"scenario,model,rate_rps,slo_ms\n{rows}")
    plan_set(
        str(scenarios), str(shared / "reference" / "gpulet"), 1, PLANNERS[planner], 1.0, str(out), None, as_json=True
    )
    assert judged(shared, scenarios, out) == (1, 1)


def test_ladders(shared: Path, tmp_path: Path) -> None:
    scenarios, out = plan(shared, "ladder", "gpulet-interference", tmp_path)
    valid, claimed = judged(shared, scenarios, out)
    assert valid == claimed
    steps: dict[str, set[int]] = defaultdict(set)
    with out.open() as file:
        for row in csv.DictReader(file):
            mix, _, step = row["scenario"].rpartition("-")
            steps[mix].add(int(step))
    for mix, least in PUBLIC_STEPS.items():
        assert steps[mix] == set(range(1, max(steps[mix]) + 1)), f"{mix}: a lower rate fails where a higher one fits"
        assert max(steps[mix]) >= least


@pytest.mark.parametrize(("like", "name"), [("gpulet-1023", "1023"), ("ladder", "ladder")])
def test_generated_sets_are_the_public_ones(shared: Path, like: str, name: str) -> None:
    assert dict(generate(like)) == read_scenarios(shared / "reference" / "gpulet" / f"scenarios-{name}.csv")


def test_the_large_set_has_every_combination() -> None:
    found = dict(generate("gpulet-19682"))
    assert len(found) == 19_682
    assert found["combo-00001"] == [("bert", 100.0, 22.0)]
    assert len(found["combo-19682"]) == 9


def test_combinations_that_only_shared_gpulets_serve(shared: Path, tmp_path: Path) -> None:
    """The exact planner finds them, and proves of others that no plan exists, though prices allow 3 % to 13 % more."""
    names = {"combo-0124": True, "combo-0121": True, "combo-0316": True, "combo-0527": False, "combo-0349": False}
    read = read_scenarios(shared / "reference" / "gpulet" / "scenarios-1023.csv")
    few, out, report = tmp_path / "few.csv", tmp_path / "plans.csv", tmp_path / "report.csv"
    with few.open("w") as file:
        write_scenarios(((name, read[name]) for name in names), file)
    plan_set(
        str(few), str(shared / "reference" / "gpulet"), 4, PLANNERS["exact"], 600.0, str(out), str(report), as_json=True
    )
    assert judged(shared, few, out) == (3, 3)
    with report.open() as file:
        found = {row["scenario"]: row["outcome"] for row in csv.DictReader(file)}
    assert found == {name: "claimed" if served else "infeasible" for name, served in names.items()}
