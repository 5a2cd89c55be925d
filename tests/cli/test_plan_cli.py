"""cotenant plan and cotenant simulate SERVICES.yaml, as a person runs them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from cotenant.cli.main import main
from cotenant.core.serving import ServingPlan
from cotenant.policy.serving.packing.check import problems
from cotenant.serving.config.planning import build_problem
from cotenant.serving.config.services import read_services

SERVICES = """
gpus: {count: 4, model: RTX2080Ti}
mechanism: mps
partitions: [20%, 40%, 50%, 60%, 80%, 100%]
replan: {period: 20s, headroom: 1.2}
services:
  - {name: cats, model: models/resnet50, rate_rps: 100, slo_ms: 108}
  - {name: words, model: bert, rate_rps: 60, slo_ms: 22, class: latency-sensitive}
applications:
  - {name: traffic, graph: {ssd-mobilenetv1: [googlenet, vgg16]}, rate_rps: 40, slo_ms: 400}
"""


@pytest.fixture
def services(tmp_path: Path) -> Path:
    path = tmp_path / "services.yaml"
    path.write_text(SERVICES)
    return path


def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: object) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of one command."""
    monkeypatch.setattr("sys.argv", ["cotenant", *map(str, args)])
    code: Any = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return int(code or 0), captured.out, captured.err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda *args: cli(capsys, monkeypatch, *args)


@pytest.mark.slow
def test_plan_then_simulate(run: Any, services: Path, tmp_path: Path) -> None:
    plan, page, log = tmp_path / "plan.json", tmp_path / "page.html", tmp_path / "log.csv"
    code, out, _ = run("plan", services, "--out", plan, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["feasible"]
    assert found["verified"]["holds"]
    assert set(found["services"]) == {"cats", "words", "traffic:ssd-mobilenetv1", "traffic:googlenet", "traffic:vgg16"}
    assert all(s["headroom"] >= 1.2 - 1e-6 and s["simulated_attainment"] > 0.99 for s in found["services"].values())
    code, out, _ = run(
        "simulate", services, "--plan", plan, "--arrivals", "poisson", "--duration", "30s", "--seed", 3, "--json",
        "--html", page, "--requests-csv", log,
    )  # fmt: skip
    assert code == 0
    result = json.loads(out)
    row = result["services"]["cats"]
    assert set(row) == {"sent", "ok", "late", "dropped", "failed", "p50_ms", "p95_ms", "p99_ms", "slo_attainment"}
    assert row["sent"] == pytest.approx(3000, rel=0.1)
    assert result["applications"]["traffic"]["slo_attainment"] > 0.98
    with log.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == result["requests"]
    assert sum(r["service"] == "cats" and r["outcome"] == "ok" for r in rows) == row["ok"]
    text = page.read_text()
    assert "src=" not in text.split("<script>")[0]
    assert "traffic:vgg16 (batch" in text


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_stages_are_told_apart_on_a_narrow_terminal(
    run: Any, services: Path, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = run("simulate", services, "--duration", "6s", "--no-verify")
    assert code == 0
    for model in ("ssd-mobilenetv1", "googlenet", "vgg16"):
        assert model in out
    assert "…" not in out
    assert "in time" in out
    assert ("left out at" in out) == (columns == "60")
    assert ("traffic:googlenet" in out) == (columns == "200")


def test_simulating_more_than_planned_shows_it(run: Any, services: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    run("plan", services, "--out", plan, "--no-verify")
    shares = {}
    for change in ("rate=x1", "rate=x3"):
        code, out, _ = run("simulate", services, "--plan", plan, "--what-if", change, "--duration", "20s", "--json")
        assert code == 0
        shares[change] = json.loads(out)["services"]["cats"]["slo_attainment"]
    assert shares["rate=x3"] < 0.8 < shares["rate=x1"]


@pytest.mark.slow
def test_fewer_gpus_and_what_if(run: Any, services: Path, tmp_path: Path) -> None:
    used = {}
    for change in ("rate=x1", "rate=x1.6"):
        _, out, _ = run("plan", services, "--min-gpus", "--no-verify", "--what-if", change, "--json")
        found = json.loads(out)
        assert found["feasible"]
        assert found["gpus"] == found["gpus_used"]
        used[change] = found["gpus_used"]
    assert used["rate=x1"] <= used["rate=x1.6"]
    code, out, err = run("plan", services, "--what-if", "rate=x40", "--json", "--out", tmp_path / "over.json")
    assert code == 1
    assert err.count("\n") == 1
    assert err.startswith("cotenant: the plan does not serve all requests of ")
    assert (tmp_path / "over.json").exists()
    over = json.loads(out)
    assert over["proven_infeasible"]
    assert over["gpulets"]
    assert "GPUs are needed" in over["left_out"][0]["reason"]


def test_moves_from_an_older_plan(run: Any, services: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    run("plan", services, "--out", plan, "--no-verify")
    _, out, _ = run("plan", services, "--from", plan, "--no-verify", "--json")
    found = json.loads(out)
    assert found["disruption"] == 0
    _, out, _ = run("plan", services, "--from", plan, "--no-verify", "--what-if", "rate.cats=x2", "--json")
    assert json.loads(out)["disruption"] > 0


def test_files_of_the_public_scheduler(run: Any, tmp_path: Path) -> None:
    """There and back: the same tasks and configuration, the plan of the named planner, its list of models."""
    public, ours, back = tmp_path / "public", tmp_path / "ours", tmp_path / "back"
    public.mkdir()
    tasks = "3\n6,100,66,\n7,100,108,\n13,50,22,\n"
    (public / "tasks.csv").write_text(tasks)
    config = {"GPUs": [{"Type": "2080ti", "Num": 3}], "Max Model": 3, "Part": 1, "Latency Ratio": 1.2,
              "Interference": 1, "Incremental": 0, "Self Tuning": 0,
              "Avail_Parts": [100, 80, 60, 50, 40, 20]}  # fmt: skip
    (public / "sim-config.json").write_text(json.dumps(config))
    devices = {"device_specs": [{"type": "2080ti", "mem_mb": 10500, "latency_prof_file": "latency.csv"}]}
    (public / "device-config.json").write_text(json.dumps(devices))
    code, out, _ = run("plan-convert", public, "--out", ours)
    assert code == 0
    assert f"cotenant plan {ours}/services.yaml --no-verify --planner gpulet-interference" in out
    plan = tmp_path / "plan.json"
    code, out, _ = run("plan", ours / "services.yaml", "--no-verify", "--out", plan, "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["planner"], found["feasible"], found["gpus"]) == ("gpulet-interference", True, 3)
    assert {let["percent"] for let in found["gpulets"]} <= {100, 80, 60, 50, 40, 20}

    assert run("plan-convert", ours / "services.yaml", "--plan", plan, "--out", back)[0] == 0
    assert (back / "tasks.csv").read_text() == tasks
    config["GPUs"] = [{"Type": "RTX2080Ti", "Num": 3}]  # the name that the catalog uses
    assert json.loads((back / "sim-config.json").read_text()) == config
    assert json.loads((back / "device-config.json").read_text())["device_specs"][0]["mem_mb"] == 10500
    rows = [r.split(",") for r in (back / "ModelList.txt").read_text().splitlines()]
    assert {r[3] for r in rows} - {"reserved"} == {"googlenet", "resnet50", "bert"}

    (public / "ModelList.txt").write_text((back / "ModelList.txt").read_text())
    assert run("plan-convert", public, "--out", ours)[0] == 0
    problem = build_problem(read_services(ours / "services.yaml"))
    again = ServingPlan.from_dict(json.loads((ours / "plan.json").read_text()), "plan.json")
    assert again.capacities() == pytest.approx({n: s["capacity_rps"] for n, s in found["services"].items()}, rel=1e-6)
    # A duty cycle is written with six decimals, which may be less than the work. There must be no other problem.
    assert all("ms of work" in p for p in problems(again, problem.services, problem.gpus))


def test_gpus_of_several_kinds_become_a_cluster(run: Any, tmp_path: Path) -> None:
    public = tmp_path / "public"
    public.mkdir()
    (public / "tasks.csv").write_text("1\n7,100,108,\n")
    groups = [{"Type": "RTX2080Ti", "Num": 2}, {"Type": "H200", "Num": 1}]
    (public / "sim-config.json").write_text(json.dumps({"GPUs": groups}))
    assert run("plan-convert", public, "--out", tmp_path / "ours")[0] == 0
    deployment = read_services(tmp_path / "ours" / "services.yaml")
    assert [m.partition("-")[0] for m in deployment.gpu_models] == ["RTX2080Ti", "RTX2080Ti", "H200"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("FOLDER", "--plan", "x.json"), "ModelList.txt"),
        (("FOLDER",), "tasks.csv: cannot be read"),
        (("none.yaml",), "none.yaml"),
        (("FILE", "--out", "FILE"), "cannot write here"),
    ],
)
def test_what_cannot_be_converted_is_one_sentence(
    run: Any, services: Path, tmp_path: Path, args: tuple[str, ...], says: str
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"FOLDER": tmp_path / "empty", "FILE": services}
    code, _, err = run("plan-convert", "--out", tmp_path / "new", *(places.get(a, a) for a in args))
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_autoscaling_over_measured_rates(run: Any, services: Path, tmp_path: Path) -> None:
    """Flat, five times as much for 100 s, flat again: up at once, down after three wishes in a row."""
    rates = tmp_path / "rates.csv"
    rows = [f"{t},{400 if 100 <= t < 200 else 80},40" for t in range(0, 400, 2)]
    rates.write_text("time_s,cats,words\n" + "\n".join(rows) + "\n")
    for forecast in ("trend", "ewma"):
        code, out, _ = run("plan", services, "--gpus", 8, "--autoscale", rates, "--forecast", forecast, "--json")
        assert code == 0
        found = json.loads(out)
        held = [row["held"] for row in found["decisions"]]
        assert held[0] == held[-1] < max(held)
        # The period of the jump cannot be foreseen. A slow mean needs more periods to follow.
        assert found["short_periods"] <= (1 if forecast == "trend" else 3)
        assert found["gpu_seconds"] >= found["gpu_seconds_needed"] - 3 * 20 * max(held)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("time_s,dogs\n0,1\n2,1\n", "dogs is not a service"),
        ("time_s,cats\n0,1\n2,x\n", "is not a finite number of at least 0"),
        ("time_s,cats\n0,1\n0,1\n", "equal steps"),
        ("time_s,cats\n0,1\n", "two rows"),
        ("time_s,cats\n0,1\n2,1\n", "two periods"),
    ],
)
def test_wrong_rates_are_one_sentence(run: Any, services: Path, tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "rates.csv"
    path.write_text(text)
    code, _, err = run("plan", services, "--autoscale", path)
    assert code == 2
    assert says in err


def test_fitting_interference(run: Any, tmp_path: Path) -> None:
    """Pairs made from known coefficients; the profile comes back with them."""
    import numpy as np

    from cotenant.profiles.serving.latency_files import load_profile, profile_to_dict, read_profile

    profile = tmp_path / "p.json"
    profile.write_text(json.dumps(profile_to_dict(load_profile("RTX2080Ti"))))
    rng = np.random.default_rng(1)
    rows = ["l2,dram,fraction,l2_other,dram_other,fraction_other,alone_ms,together_ms"]
    for _ in range(60):
        l2, dram, other, far = rng.random(4)
        slowdown = 1.02 + 0.5 * (0.1 * l2 + 0.3 * dram + 0.8 * other + 0.2 * far)
        rows.append(f"{l2},{dram},0.5,{other},{far},0.5,10,{10 * slowdown}")
    (tmp_path / "pairs.csv").write_text("\n".join(rows) + "\n")
    code, out, _ = run(
        "plan", "fit-interference", "--pairs", tmp_path / "pairs.csv", "--profile", profile, "--out",
        tmp_path / "new.json", "--json",
    )  # fmt: skip
    assert code == 0
    assert json.loads(out)["relative_error"]["p95"] < 1e-6
    fitted = read_profile(tmp_path / "new.json").interference
    assert (fitted.l2_other, fitted.dram_self, fitted.constant) == pytest.approx((0.8, 0.3, 1.02))
    assert run("plan", "fit-interference")[0] == 2


def test_scenario_sets(run: Any, tmp_path: Path) -> None:
    code, _, _ = run("plan", "scenarios", "--like", "ladder", "--out", tmp_path / "all.csv")
    assert code == 0
    lines = (tmp_path / "all.csv").read_text().splitlines()
    few = [x for x in lines if x.startswith(("scenario", "scen2-01", "scen2-15"))]
    (tmp_path / "few.csv").write_text("\n".join(few) + "\n")
    code, out, _ = run(
        "plan", "--scenarios", tmp_path / "few.csv", "--gpus", 4, "--out", tmp_path / "p.csv", "--report",
        tmp_path / "r.csv", "--json",
    )  # fmt: skip
    assert code == 0
    found = json.loads(out)
    assert (found["scenarios"], found["claimed"], found["proven_infeasible"]) == (20, 10, 10)
    assert set(found["decision_ms"]) == {"median", "max"}
    with (tmp_path / "p.csv").open() as file:
        assert len({r["scenario"] for r in csv.DictReader(file)}) == 10


GPUS = "gpus: {count: 2, model: RTX2080Ti}\n"
ONE = "services: [{name: a, model: resnet50, rate_rps: 10, slo_ms: 100}]\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GPUS + "services: [{name: a, model: resnet50, rate_rps: 10, slo_ms: 5}]", "below"),
        (GPUS + "services: [{name: a, model: resnet50, rate_rps: 0, slo_ms: 100}]", "services[0].rate_rps"),
        (GPUS + "services: [{name: a, model: resnet50, rate_rps: .nan, slo_ms: 100}]", "services[0].rate_rps"),
        (GPUS + "services: [{name: a, model: resnet9000, rate_rps: 1, slo_ms: 100}]", "absent"),
        (GPUS + "partitions: [120%]\n" + ONE, "partitions"),
        (GPUS + "partitions: [35%]\n" + ONE, "no partition 35%"),
        ("gpus: {count: 2, model: B200}\n" + ONE, "no serving profile for GPU type 'B200'"),
        (GPUS + "mechanism: mig\n" + ONE, "no MIG slices"),
        (GPUS + "mechanism: magic\n" + ONE, "mechanism"),
        (GPUS + "applications: [{name: x, graph: {vgg16: [resnet50], resnet50: [vgg16]}, rate_rps: 1, slo_ms: 900}]",
         "cycle"),
        (GPUS + "applications: [{name: x, graph: race, rate_rps: 1, slo_ms: 900}]", "known: game, traffic"),
        (GPUS + ONE.replace("}]", "}, {name: a, model: bert, slo_ms: 22}]"), "twice"),
        (GPUS + "services: [", "not valid YAML"),
        (GPUS + "services:\n  - {name: a, slo_ms: 9}\n  - name: b\n    slo_ms: -1\n", "line 5, field services[1].slo"),
        (GPUS + "services:\n  - {name: a, slo_ms: 1}\nservices: []\n", "line 4, field services: services is already"),
        (GPUS, "declares neither services nor applications"),
        (ONE, "give gpus or cluster"),
        ("- a\n", "needs gpus and services"),
    ],
)  # fmt: skip
def test_wrong_files_are_one_sentence(run: Any, tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    code, out, err = run("plan", path, "--json")
    assert (code, out) == (2, "")
    assert all(words in err for words in (says, str(path)))
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "give SERVICES.yaml"),
        (("none.yaml",), "cannot be read"),
        (("FILE", "--planner", "best"), "known: temporal"),
        (("FILE", "--what-if", "rate=lots"), "is not a change"),
        (("FILE", "--what-if", "rate.dogs=2"), "is not a service"),
        (("FILE", "--gpus", "0"), "number of GPUs must be at least 1"),
        (("FILE", "--from", "FILE"), "not JSON"),
        (("FILE", "--attainment", "120%"), "over 100%"),
        (("scenarios", "--like", "all"), "known: gpulet-1023"),
        (("--scenarios", "none.csv"), "cannot be read"),
    ],
)
def test_wrong_options_are_one_sentence(run: Any, services: Path, args: tuple[str, ...], says: str) -> None:
    code, _, err = run("plan", *(services if a == "FILE" else a for a in args))
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--arrivals", "sometimes"), "not an arrival process"),
        (("--duration", "0s"), "must be above 0"),
        (("--hold", "2"), "between 0 and 1"),
        (("--plan", "none.json"), "none.json: cannot be read: no such file or directory"),
        (("--arrivals", "trace:disb:none.json"), "cannot read"),
    ],
)
def test_wrong_simulations_are_one_sentence(run: Any, services: Path, args: tuple[str, ...], says: str) -> None:
    code, _, err = run("simulate", services, "--no-verify", *args)
    assert code == 2
    assert says in err


def test_outputs_are_checked_before_any_is_written(run: Any, services: Path, tmp_path: Path) -> None:
    code, _, err = run("plan", services, "--out", tmp_path / "no" / "plan.json")
    assert code == 2
    assert "cannot write here" in err
    scenarios = tmp_path / "s.csv"
    scenarios.write_text("scenario,model,rate_rps,slo_ms\nx,resnet50,30,108\n")
    code, _, err = run("plan", "--scenarios", scenarios, "--out", tmp_path / "p.csv", "--report", tmp_path / "no" / "r")
    assert code == 2
    assert not (tmp_path / "p.csv").exists()


@pytest.mark.parametrize("gpus", ["0", "-2", "99999999"])
def test_numbers_of_gpus_that_cannot_be(run: Any, services: Path, tmp_path: Path, gpus: str) -> None:
    scenarios = tmp_path / "s.csv"
    scenarios.write_text("scenario,model,rate_rps,slo_ms\nx,resnet50,30,108\n")
    for args in (("plan", services), ("plan", "--scenarios", scenarios), ("simulate", services, "--no-verify")):
        code, out, err = run(*args, "--gpus", gpus)
        assert (code, out) == (2, "")
        assert "--gpus: " in err


def test_seeds_below_zero_are_refused(run: Any, services: Path) -> None:
    for verb in ("plan", "simulate"):
        code, out, err = run(verb, services, "--seed", "-5")
        assert (code, out) == (2, "")
        assert "-5" in err


def test_a_plan_for_cores_says_that_its_speeds_are_those_of_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, services: Path
) -> None:
    said = "note: mechanism cores gives workers CPU cores, but this plan uses speeds measured on parts of RTX2080Ti"
    assert said not in cli(capsys, monkeypatch, "plan", services, "--json")[2]
    services.write_text(SERVICES.replace("mechanism: mps", "mechanism: cores"))
    code, _, err = cli(capsys, monkeypatch, "plan", services, "--json")
    assert code == 0
    assert said in err
