"""The Python interface gives what the command line gives, and one sentence for what cannot be."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import cotenant
from cotenant.cli import plan as plan_cli
from cotenant.core.errors import InputError, WorkError
from cotenant.workloads.trace_options import TraceOptions

SERVICES = """\
gpus: {count: 4, model: RTX2080Ti}
services:
  - {name: resnet50, model: resnet50, rate_rps: 150, slo_ms: 108}
"""


def test_a_run_is_the_same_from_a_file_and_from_memory(tmp_path: Path) -> None:
    trace = cotenant.draw_trace(60, cluster="2x8", load=1.5, seed=3)
    run = cotenant.simulate(trace, cluster="2x8", ordering="las", allotment="tune", out=tmp_path / "run")
    again = cotenant.read_record(tmp_path / "run")
    assert again.summary == run.summary
    assert again.label == run.label
    assert len(run.jobs) == 60
    assert run.summary["jct_s"]["mean"] == pytest.approx(float(np.nanmean(run.jobs["jct_s"].to_numpy())))


def test_runs_side_by_side_keep_their_figures_and_escape_their_names(tmp_path: Path) -> None:
    trace = cotenant.draw_trace(40, cluster="1x8", seed=3)
    runs = [cotenant.simulate(trace, cluster="1x8", ordering=name, label=f"<{name}>") for name in ("fifo", "srtf")]
    compared = cotenant.compare(*runs)
    assert compared.table["run"].to_list() == ["<fifo>", "<srtf>"]
    assert compared.table["jct_s.mean"].to_list() == [run.summary["jct_s"]["mean"] for run in runs]
    assert repr(compared).split("\n")[0].split() == ["run", "<fifo>", "<srtf>"]  # one row for each figure
    shown = compared._repr_html_()
    assert "&lt;fifo&gt;" in shown
    assert "<fifo>" not in shown
    compared.write_page(tmp_path / "page.html")
    assert compared.report().page == (tmp_path / "page.html").read_text()


def test_a_plan_is_the_command_line_s(tmp_path: Path) -> None:
    file = tmp_path / "services.yaml"
    file.write_text(SERVICES)
    planned = cotenant.plan(file, min_gpus=True)
    content = json.loads(CliRunner().invoke(plan_cli.app, [str(file), "--min-gpus", "--json"]).stdout)
    assert planned.plan.to_dict()["gpulets"] == content["gpulets"]
    assert planned.holds is True
    assert planned.attainment["resnet50"] == content["services"]["resnet50"]["simulated_attainment"]


def test_predicted_speeds_are_relative_to_the_whole_gpu() -> None:
    latencies = np.ones((3, 7)) * np.array([[1.0], [1.2], [2.5]])
    found = cotenant.predict(latencies)
    assert found.latencies.shape == (1, 3, 7)
    assert found.speeds.shape == (1, 7, 5)
    assert np.allclose(found.speeds[..., 0], 1.0)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: cotenant.simulate("nowhere.csv"), "nowhere.csv"),
        (lambda: cotenant.simulate(cotenant.draw_trace(5), orderin="las"), "orderin: is not an option"),
        (lambda: cotenant.draw_trace(5, lik="philly"), "lik: is not an option"),
        (lambda: cotenant.compare(), "at least one run"),
        (lambda: cotenant.compare("fifo"), "'fifo' is no run"),  # type: ignore[arg-type]
        (lambda: cotenant.compare(cotenant.simulate(cotenant.draw_trace(5)), baseline="zzz"), "no run of policy 'zzz'"),
        (lambda: cotenant.plan([{"name": "a"}]), "services: must be a text or a path"),  # type: ignore[arg-type]
        (lambda: cotenant.plan("nowhere.yaml"), "nowhere.yaml"),
        (lambda: cotenant.plan("nowhere.yaml", headroom=0.5), "between 1 and 100"),
        (lambda: cotenant.predict([[1.0, 2.0]]), "(n, 3, 7)"),
    ],
)
def test_what_cannot_be_is_one_sentence(call: Callable[[], object], said: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert said in str(caught.value)


WRONG = (42, 4.2, True, None, "text", b"bytes", [1], ("a",), {"a": 1}, object())
CALLS: dict[str, tuple[Callable[..., object], dict[str, object], set[str]]] = {
    "draw_trace": (cotenant.draw_trace, {"jobs": 3}, {"like", "durations", "gpu_mix", "rate_per_s", "split_mode"}),
    "simulate": (cotenant.simulate, {"trace": "nowhere.csv"}, {"ordering", "lease", "allotment", "sticky", "measure"}),
    "read_record": (cotenant.read_record, {"folder": "nowhere"}, set()),
    "plan": (cotenant.plan, {"services": "nowhere.yaml"}, set()),
    "predict": (cotenant.predict, {"latencies": [[1.0] * 7] * 3}, set()),
    "Agent": (cotenant.Agent, {"folder": "nowhere"}, set()),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_of_any_type_is_taken_or_refused_by_name(name: str) -> None:
    """Every argument of every call, with values of ten types: no other error comes out than the two promised ones."""
    call, given, options = CALLS[name]
    kinds = inspect.signature(call).parameters.values()
    named = {p.name for p in kinds if p.kind != p.VAR_KEYWORD and p.name not in ("out", "folder")} | options
    for argument in sorted(named):
        for value in WRONG:
            with suppress(InputError, WorkError):
                call(**{**given, argument: value})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: cotenant.simulate(42), "trace: must be a text or a Trace, not 42 (int)"),  # type: ignore[arg-type]
        (lambda: cotenant.simulate(None), "trace: must be"),  # type: ignore[arg-type]
        (lambda: cotenant.simulate("a.csv", cluster=4), "cluster: must be a text or a Cluster"),  # type: ignore[arg-type]
        (lambda: cotenant.simulate("a.csv", out=4), "out: must be"),  # type: ignore[arg-type]
        (lambda: cotenant.simulate("a.csv", select=4), "select: must be"),  # type: ignore[arg-type]
        (lambda: cotenant.simulate("a.csv", select=TraceOptions(max_jobs="5")), "max_jobs: must be"),  # type: ignore[arg-type]
        (lambda: cotenant.draw_trace(True), "jobs: must be a whole number, not True"),
        (lambda: cotenant.draw_trace(5, load="90%"), "load: must be a number"),  # type: ignore[arg-type]
        (lambda: cotenant.draw_trace(5, gpu_mix=8), "gpu_mix: must be a text"),
        (lambda: cotenant.read_record(42), "folder: must be"),  # type: ignore[arg-type]
        (lambda: cotenant.plan("a.yaml", changes="rate=x2"), "changes: must be a list of texts"),
        (lambda: cotenant.predict([[1.0], [1.0, 2.0]]), "latencies: must be an array"),
        (lambda: cotenant.Agent(42), "folder: must be"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_type_is_named(call: Callable[[], object], said: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert said in str(caught.value)


def test_numbers_of_numpy_and_paths_are_taken(tmp_path: Path) -> None:
    trace = cotenant.draw_trace(np.int64(5), load=np.float64(0.5), seed=np.int64(2))
    assert len(trace.jobs) == 5
    with pytest.raises(InputError, match=r"nowhere\.yaml"):
        cotenant.plan(tmp_path / "nowhere.yaml", headroom=2)


def test_without_an_agent_the_error_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="start one with cotenant agent"):
        cotenant.Agent(tmp_path)


def test_names_are_found_without_importing_them() -> None:
    assert {"simulate", "Agent", "loop"} <= set(dir(cotenant))
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = cotenant.simulat  # type: ignore[attr-defined]
