"""cotenant plan and simulate for GPUs that are cut by MIG, as a person runs them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cotenant.cli.main import main
from cotenant.core.errors import InputError
from cotenant.core.mig import geometry, parse_layout
from cotenant.serving.config.planning import build_problem
from cotenant.serving.config.services import read_services


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def one(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["cotenant", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return one


def test_plan_under_mig_prints_layouts_that_apply(run: Any, tmp_path: Path) -> None:
    """What the profile has times for is what GPUs are cut into; the layouts are ones that `mig apply` takes, and the
    plan is simulated from its file. A server takes whole instances only."""
    content = "gpus: {count: 2, model: A100-80GB}\nservices:\n"
    content += "  - {name: cats, model: resnet50, rate_rps: 800, slo_ms: 200}\n"
    content += "  - {name: words, model: bert, rate_rps: 15, slo_ms: 2000}\n"
    services, plan = tmp_path / "services.yaml", tmp_path / "plan.json"
    services.write_text(content)
    code, out, err = run("plan", services, "--min-gpus", "--no-verify", "--out", plan, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["feasible"]
    assert list(found["layouts"]) == ["0"]
    geo = geometry("A100-80GB")
    layout = parse_layout(geo, found["layouts"]["0"])
    assert {p.start for p in layout} == {x["instance"] for x in found["gpulets"]}
    code, out, err = run("simulate", services, "--plan", plan, "--duration", "20s", "--json")
    assert code == 0, err
    assert min(x["slo_attainment"] for x in json.loads(out)["services"].values()) > 0.99
    code, out, _ = run("plan", services, "--no-verify")
    assert "MIG layout of GPU 0:" in out
    whole = build_problem(replace(read_services(services), mechanism="mig"), live=True)
    assert {p.processes for p in whole.gpus.profiles[0].partitions} == {1}
    with pytest.raises(InputError, match="cannot give to workers: plans with this profile can only be simulated"):
        build_problem(read_services(services), live=True)
