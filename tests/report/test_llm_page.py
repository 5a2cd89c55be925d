"""The page of requests to language models, simulated ones above all: load tests are in tests/loadgen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command import cotenant

from cotenant.core.metrics.tokens import Target
from cotenant.policy.residency import Do, ModelFacts
from cotenant.profiles.llm.profile import LlmProfile, StepTimes
from cotenant.report.llm import build_page, page_data, stays
from cotenant.sim.llm.engine import LlmSetup, SimModel, Switch, simulate
from cotenant.workloads.llm.trace import make_trace

MODELS = """
gpus: {count: 1, memory: 40GiB}
models:
  - {name: a, command: "x {port}", memory: 30GiB, ttft_ms: 200}
  - {name: b, command: "x {port}", memory: 30GiB}
"""


def test_bars_of_stays_by_hand() -> None:
    switches = [
        Switch(0.0, 0.0, 0, 0, None), Switch(100.0, 1.0, 0, 0, Do.EVICT), Switch(101.0, 30.0, 1, 0, Do.START),
        Switch(200.0, 2.0, 1, 0, Do.STOP), Switch(202.0, 3.0, 0, 0, Do.BRING),
    ]  # fmt: skip
    bars = sorted((row["start"], row["end"], row["model"], row["moving"]) for row in stays(switches, 300.0))
    assert bars == [
        (0, 100, 0, False), (100, 101, 0, True), (101, 131, 1, True), (131, 200, 1, False), (200, 202, 1, True),
        (202, 205, 0, True), (205, 300, 0, False),
    ]  # fmt: skip


def test_bars_that_nobody_could_tell_apart_are_one() -> None:
    switches = []
    for n in range(3000):
        switches += [Switch(n / 3, 0.1, 0, 0, Do.BRING), Switch(n / 3 + 0.25, 0.05, 0, 0, Do.EVICT)]
    bars = sorted((row["moving"], round(row["start"]), round(row["end"])) for row in stays(switches, 1000.0))
    assert bars == [(False, 0, 1000), (True, 0, 1000)]


def test_page_is_whole_and_safe() -> None:
    profile = LlmProfile("x", StepTimes(0.01, 0.001, 0.0, 0.02, 0.0, 0.0), 10_000, 1000, max_context=5000)
    model = SimModel(ModelFacts("<b>&a", 1 << 30), profile, Target("<b>&a", ttft_ms=100))
    trace = make_trace("test", [0.0, 1.0], [0, 0], [20, 20], [1, 2], ("<b>&a",), zero_s=0.0)
    result = simulate(trace, LlmSetup((model,), (8 << 30,)))
    page = build_page(result)
    assert "{{" not in page.split("<script>")[0]
    assert "<b>&a" not in page
    assert "1 models on 1 GPU" not in page
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    assert json.loads(found[1]) == json.loads(json.dumps(page_data(result)))
    assert page_data(result)["models"][0]["ttft"] == {"x": [30, 30], "y": [0.5, 1], "promise": 100}


def test_the_command_writes_it(tmp_path: Path) -> None:
    models, page = tmp_path / "models.yaml", tmp_path / "page.html"
    models.write_text(MODELS)
    asked = ("simulate", "--serving", models, "--profile", "8b", "--rate", "1", "--duration", "20s", "--html")
    done = cotenant(*asked, page)
    assert done.code == 0, done.err
    text = page.read_text()
    assert "2 models on 1 GPU of 40 GiB, conserving shares, busy" in text
    assert "Language models, simulated" in text
    missing = cotenant(*asked, tmp_path / "no" / "page.html")
    assert (missing.code, "no" in missing.err) == (2, True)


@pytest.mark.parametrize(("end_s", "shown"), [(0.0, 0), (1e-9, 1)])
def test_a_run_of_no_time(end_s: float, shown: int) -> None:
    assert len(stays([Switch(0.0, 0.0, 0, 0, None)], end_s)) == shown
