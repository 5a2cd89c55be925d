"""Experiments as files: the shipped ones can be planned, a run leaves its analysis, wrong files say what is wrong."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cotenant.loadgen.experiment import load_services, make_plan, read_experiment, shipped
from cotenant.serving.config.planning import build_problem

SMALL = {
    "title": "Small",
    "duration": "3s",
    "services": {
        "gpus": {"count": 1, "model": "RTX2080Ti"},
        "backend": "timed",
        "services": [{"name": "cats", "model": "resnet50", "rate_rps": 20, "slo_ms": 1000}],
        "applications": [{"name": "game", "graph": {"lenet1": ["googlenet"]}, "rate_rps": 10, "slo_ms": 1000}],
    },
}


def write(folder: Path, content: Any) -> Path:
    path = folder / "small.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_the_applications_and_mixes_of_the_gpulet_paper_are_there() -> None:
    assert set(shipped()) == {
        "game", "traffic", "equal", "long-only", "short-skew", "scen1", "scen2", "scen3", "scen4", "scen5",
    }  # fmt: skip


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_experiment_has_a_plan(name: str) -> None:
    found = read_experiment(name, {})
    plan = make_plan(build_problem(found.deployment), 0)
    assert plan.feasible
    assert {s.name for s in load_services(found)} == {
        *(s.name for s in found.deployment.services),
        *(a.name for a in found.deployment.applications),
    }


def test_a_run_leaves_its_analysis(call: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, text, err = call("experiment", write(tmp_path, SMALL), "--out", out, "--rate", "x2", "--json")
    assert code == 0, err
    found = json.loads(text)
    assert found["server_exit_code"] == 0
    assert json.loads((out / "summary.json").read_text()) == found
    assert set(found["services"]) == {"cats", "game"}
    assert found["services"]["cats"]["sent"] == pytest.approx(2 * 20 * 3, rel=0.4)
    assert found["wrong_answers"] == found["stray_answers"] == 0
    assert found["services"]["cats"]["failed"] == found["services"]["game"]["failed"] == 0
    # A model that takes 10 to 20 ms cannot answer sooner, neither live nor simulated.
    assert found["simulated"]["cats"]["p50_ms"] > 9
    assert found["live_over_simulated"]["cats"]["p50_ms"] > 0.9
    rows = list(csv.DictReader((out / "client.csv").open()))
    assert len(rows) == found["requests"]
    server = list(csv.DictReader((out / "server.csv").open()))
    assert sum(r["service"] == "cats" for r in server) == found["services"]["cats"]["sent"]
    assert "<title>Small</title>" in (out / "report.html").read_text()
    assert json.loads((out / "plan.json").read_text())["feasible"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("nothing: here", "services"),
        ("[", "not valid YAML"),
        ({**SMALL, "duration": "soon"}, "is not a quantity"),
        ({**SMALL, "load": {"rate": "fast"}}, "is not a factor"),
        ({**SMALL, "load": {"rates": {"dogs": [1]}}}, "'dogs' is not a service"),
        ({**SMALL, "load": {"speed": 1}}, "load.speed"),
        ({**SMALL, "services": "none.yaml"}, "cannot be read"),
    ],
)
def test_wrong_files_are_one_sentence(call: Any, tmp_path: Path, content: Any, sentence: str) -> None:
    code, out, err = call("experiment", write(tmp_path, content), "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_an_unknown_name_lists_the_shipped(call: Any) -> None:
    code, _, err = call("experiment", "nonesuch")
    assert code == 2
    assert "traffic" in err
    assert call("experiment", "--list")[1].count("\n") == len(shipped())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--duration", "0s"), "--duration: '0s' is not above 0 s"),
        (("--duration", "soon"), "--duration: 'soon' is not a quantity"),
        (("--rate", "x0"), "--rate: 'x0' is not a factor"),
        (("--out", "taken"), "taken: exists and is not a folder; choose another name"),
    ],
)
def test_wrong_options_are_refused_before_the_server_starts(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    code, _, err = call("experiment", write(tmp_path, SMALL), *words)
    assert (code, err.count("\n")) == (2, 1), err
    assert said in err
    assert not list(tmp_path.glob("*-out"))


def test_a_file_whose_load_takes_no_time_is_refused_at_its_line(call: Any, tmp_path: Path) -> None:
    code, _, err = call("experiment", write(tmp_path, {**SMALL, "duration": "0s"}), "--out", tmp_path / "out")
    assert code == 2
    assert "small.yaml, line 1, field duration: '0s' is not above 0 s" in err
