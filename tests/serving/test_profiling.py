"""Profiles of services: what is measured is what a known model takes, and an interrupted run goes on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cotenant.core.errors import InputError, WorkError
from cotenant.core.partial import Partial
from cotenant.profiles.serving.latency_files import read_profile
from cotenant.serving.workers.onemodel import OneModel, find_model, local_factory
from cotenant.serving.workers.profiling import ProfileRun, assemble, measure

MS = {"1": 4.0, "4": 10.0}


def timed_model(folder: Path, name: str = "clock", **more: Any) -> Path:
    """A model whose batches of 1 and 4 take 4 and 10 ms, whatever the share."""
    target = folder / name / "1"
    target.mkdir(parents=True)
    (target / "timed.json").write_text(json.dumps({"latency_ms": MS, **more}))
    return folder / name


def run_of(model: Path, **more: Any) -> ProfileRun:
    name, found = find_model(str(model))
    return ProfileRun(name, found, "cores", {"50%": 0.5, "100%": 1.0}, (1, 4), 0.1, **more)


def test_a_model_of_known_times_has_them_in_its_profile(call: Any, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    model = timed_model(tmp_path)
    code, text, err = call(
        "profile", "service", model, "--out", out, "--batches", "1,4", "--seconds", "100ms", "--margin", "1", "--json"
    )
    assert code == 0, err
    found = json.loads(text)
    profile = read_profile(out)
    for label in found["latency_ms"]:
        # The time of execution and the time of the transfer add up to the model's own time, which starts at the
        # submission.
        for batch, ms in ((1, 4.0), (4, 10.0)):
            whole = profile.latency_ms("clock", batch, label) + profile.overhead_ms("clock", batch)
            assert whole >= 0.98 * ms
    assert profile.margin == 1.0
    assert profile.max_gpulets == len(profile.partitions)
    assert not out.with_name("profile.json.partial").exists()


def test_another_model_joins_the_profile(call: Any, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    options = ("--out", out, "--batches", "1", "--seconds", "20ms", "--partitions", "100%")
    for name in ("a", "b"):
        assert call("profile", "service", timed_model(tmp_path, name), *options)[0] == 0
    assert set(read_profile(out).models) == {"a", "b"}
    code, _, err = call("profile", "service", tmp_path / "a", *options[:-1], "50%")
    assert code == 2
    assert "other partitions" in err
    assert set(read_profile(out).models) == {"a", "b"}


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    run = run_of(timed_model(tmp_path))
    out = tmp_path / "profile.json"
    first = Partial(out, run.key)
    first.put("cell/100%/1", {"executed_ms": 123.0, "overhead_ms": 1.0, "spread": 1.0, "runs": 9})
    again = Partial(out, run.key)
    rows = asyncio.run(measure(run, again))
    assert rows["cell/100%/1"]["executed_ms"] == 123.0
    assert rows["cell/100%/4"]["executed_ms"] >= 9.0
    assert Partial(out, run.key).rows == rows
    assert Partial(out, "something else").rows == {}
    assert Partial(out, run_of(tmp_path / "clock", sizes={"INPUT": (2, 2)}).key).rows == {}, "with other sizes"


def test_neighbours_slow_each_other_by_a_factor(tmp_path: Path) -> None:
    """What is measured is kept; with a slowdown, plans are made for it, and without one nothing is claimed."""
    run = run_of(timed_model(tmp_path), against=(("clock2", find_model(str(timed_model(tmp_path, "clock2")))[1]),))
    rows = asyncio.run(measure(run, Partial(tmp_path / "p.json", run.key)))
    assert rows["beside/clock2"]["slowdown"] > 0
    slow = assemble(run, {**rows, "beside/clock2": {"slowdown": 1.4, "slows_it": 1.1}}, None, "2026-01-01")
    assert slow["interference"]["constant"] == 1.4
    even = assemble(run, {**rows, "beside/clock2": {"slowdown": 0.98, "slows_it": 1.0}}, None, "2026-01-01")
    assert even["interference"] is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--batches", "0"], "not a list of batch sizes"),
        (["--partitions", "0%"], "runs nothing"),
        (["--partitions", "120%"], "is over 100%"),
        (["--mechanism", "magic"], "is not one of mps, green, cores"),
        (["--margin", "0.5"], "between 1 and 100"),
        (["--against", "/nowhere"], "is not the folder NAME"),
    ],
)
def test_wrong_input_is_one_sentence(call: Any, tmp_path: Path, arguments: list[str], sentence: str) -> None:
    code, out, err = call("profile", "service", timed_model(tmp_path), "--out", tmp_path / "p.json", *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert not (tmp_path / "p.json").exists()


def test_a_model_that_fails_is_a_failure_with_its_reason(call: Any, tmp_path: Path) -> None:
    model = timed_model(tmp_path, faults={"on_load": "error"})
    code, _, err = call("profile", "service", model, "--out", tmp_path / "p.json", "--batches", "1")
    assert code == 1
    assert "clock cannot be loaded: failed, as the drill requested" in err
    assert not (tmp_path / "p.json").exists()
    crashing = run_of(timed_model(tmp_path, "dies", faults={"on_load": "crash"}))
    with pytest.raises(WorkError, match="ended by SIG"):
        asyncio.run(measure(crashing, Partial(tmp_path / "q.json", crashing.key)))


def test_infer_reports_one_model_on_one_share(call: Any, tmp_path: Path) -> None:
    model = timed_model(tmp_path)
    code, text, err = call("infer", model, "--count", "30", "--batch", "4", "--share", "50%", "--json")
    assert code == 0, err
    found = json.loads(text)
    assert found["latency_ms"]["p50"] >= 9.9
    assert 0 < found["items_per_s"] <= 404
    assert (found["share"], found["batches"], found["batch"]) == (0.5, 30, 4)
    code, _, err = call("infer", tmp_path / "none")
    assert code == 2
    assert "is not the folder NAME of a model" in err


def test_a_worker_that_ends_between_two_batches_is_a_failure(tmp_path: Path) -> None:
    """The next batch waited for ever."""
    name, found = find_model(str(timed_model(tmp_path)))
    share = {"fraction": 1.0, "partition": "100%", "mechanism": "cores", "batch": 4}

    async def play() -> None:
        async with OneModel(local_factory("cores"), name, found, **share) as model:  # type: ignore[arg-type]
            await model.run(1)
            model.worker.kill()
            while Path(f"/proc/{model.worker.pid}").exists():
                await asyncio.sleep(0.01)
            with pytest.raises(WorkError, match="the worker of clock was ended by SIGKILL"):
                await asyncio.wait_for(model.run(1), 60)

    asyncio.run(play())


@pytest.mark.timed
def test_a_model_of_known_times_is_measured_closely(tmp_path: Path) -> None:
    run = run_of(timed_model(tmp_path), against=(("clock2", find_model(str(timed_model(tmp_path, "clock2")))[1]),))
    rows = asyncio.run(measure(run, Partial(tmp_path / "p.json", run.key)))
    for batch, ms in ((1, 4.0), (4, 10.0)):
        cell = rows[f"cell/100%/{batch}"]
        assert cell["executed_ms"] + cell["overhead_ms"] < 1.5 * ms
    assert 0.7 < rows["beside/clock2"]["slowdown"] < 1.5


def test_infer_counts_from_when_a_batch_was_due(call: Any, tmp_path: Path) -> None:
    """A batch of 10 ms each 5 ms: the n-th waits 5n ms and more, which a clock started at its own start would hide."""
    code, text, _ = call("infer", timed_model(tmp_path), "--count", "40", "--batch", "4", "--interval", "5ms", "--json")
    assert code == 0
    assert json.loads(text)["latency_ms"]["max"] >= 0.98 * (40 * 10 - 39 * 5)


def test_a_model_that_takes_one_item_is_said(tmp_path: Path) -> None:
    run = run_of(timed_model(tmp_path))
    assert isinstance(run.cells[0], tuple)
    with pytest.raises(InputError, match="has 1 sizes; 2 were given"):
        asyncio.run(measure(run_of(tmp_path / "clock", sizes={"INPUT": (2, 2)}), Partial(tmp_path / "p", "k")))
