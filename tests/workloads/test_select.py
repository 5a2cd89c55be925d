"""Windows, filters, scaling and drawn parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cotenant.core.errors import InputError
from cotenant.core.work import Trace
from cotenant.workloads.jobs.select import load_trace
from cotenant.workloads.trace_options import TraceOptions

CLASSES = {"image": ("alexnet", "res18"), "language": ("gnmt",), "speech": ("m5",)}
ITERATION_S = {"alexnet": 0.5, "gnmt": 2.0, "res18": 1.0, "m5": 1.0}


@pytest.fixture
def spec(tmp_path: Path) -> str:
    """Ten jobs, one each 100 s: GPUs 1,2,4,8,0.5 and again; durations 10, 20, ... 100; tenants a and b in turn."""
    rows = ["id,arrival_s,gpus,duration_s,tenant,deadline_s"]
    gpus = [1, 2, 4, 8, 0.5] * 2
    for k in range(10):
        rows.append(f"j{k},{100 * k},{gpus[k]},{10 * (k + 1)},{'ab'[k % 2]},{100 * k + 50}")
    path = tmp_path / "t.csv"
    path.write_text("\n".join(rows))
    return f"native:{path}"


def ids(trace: Trace) -> list[str]:
    return [str(i).removeprefix("j") for i in trace.jobs.id]


def test_defaults_change_nothing(spec: str) -> None:
    trace = load_trace(spec)
    assert len(trace.jobs) == 10
    assert (trace.left_out, trace.remarks, trace.seed) == ({}, [], None)
    assert set(trace.jobs.model.tolist()) == {""}


def test_window_is_half_open_and_its_start_becomes_zero(spec: str) -> None:
    trace = load_trace(spec, TraceOptions(from_s=200, to_s=500))
    assert ids(trace) == ["2", "3", "4"]
    assert trace.jobs.arrival_s.tolist() == [0.0, 100.0, 200.0]
    assert trace.jobs.deadline_s.tolist() == [50.0, 150.0, 250.0]
    assert trace.left_out == {"outside the window": 7}


def test_tenants_gpu_counts_durations_and_count_in_that_order(spec: str) -> None:
    options = TraceOptions(tenants=("a",), gpu_counts="multi", min_duration_s=25, max_jobs=1)
    trace = load_trace(spec, options)
    assert ids(trace) == ["2"]
    # Left out: b's five jobs; two of a's jobs (0 2 4 6 8, with GPUs 1 4 0.5 2 8), which have a single GPU; and two
    # beyond the first. None is shorter than 25 s.
    assert trace.left_out == {"of other tenants": 5, "on 1 GPU or less": 2, "beyond the first 1 job": 2}


@pytest.mark.parametrize(
    ("options", "kept", "reason"),
    [
        (TraceOptions(gpu_counts="single"), "0459", "on more than 1 GPU"),
        (TraceOptions(only_gpus=(2, 8)), "1368", "with a GPU count not among 2,8"),
        (TraceOptions(min_duration_s=30, max_duration_s=50), "234", "with a duration outside the limits"),
    ],
)
def test_filters(spec: str, options: TraceOptions, kept: str, reason: str) -> None:
    trace = load_trace(spec, options)
    assert ids(trace) == list(kept)
    assert trace.left_out == {reason: 10 - len(kept)}


def test_as_single_gives_every_job_one_gpu(spec: str) -> None:
    trace = load_trace(spec, TraceOptions(gpu_counts="as-single"))
    assert trace.jobs.gpus.tolist() == [1.0] * 10


def test_rate_scale_shrinks_gaps_and_keeps_the_slack_of_deadlines(spec: str) -> None:
    trace = load_trace(spec, TraceOptions(rate_scale=4, from_s=100))
    assert trace.jobs.arrival_s.tolist() == [25.0 * k for k in range(9)]
    assert trace.jobs.deadline_s.tolist() == [25.0 * k + 50 for k in range(9)]


def test_drawn_parts_are_seeded_and_independent(spec: str) -> None:
    plain = load_trace(spec, TraceOptions(durations="two-part", seed=5))
    also_arrivals = load_trace(spec, TraceOptions(durations="two-part", arrivals="poisson", gpu_mix="1:1,2:1", seed=5))
    assert plain.jobs.duration_s.tolist() == also_arrivals.jobs.duration_s.tolist()
    assert plain.jobs.arrival_s.tolist() == [100.0 * k for k in range(10)]
    assert plain.seed == 5
    other = load_trace(spec, TraceOptions(durations="two-part", seed=6))
    assert plain.jobs.duration_s.tolist() != other.jobs.duration_s.tolist()
    assert any("seed 5" in remark for remark in plain.remarks)
    assert (np.diff(also_arrivals.jobs.arrival_s) >= 0).all()
    assert set(also_arrivals.jobs.gpus.tolist()) <= {1.0, 2.0}


def test_static_and_borrowed_arrivals_and_durations(spec: str, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("id,arrival_s,gpus,duration_s\nx,7,1,3\ny,9,1,3\nz,13,1,3\n")
    trace = load_trace(spec, TraceOptions(arrivals=f"trace:native:{other}", durations=f"trace:{other}"))
    # The arrivals are 0, 2 and 6. Each repetition starts one mean gap (3 s) after the end of the one before.
    assert trace.jobs.arrival_s.tolist() == [0.0, 2, 6, 9, 11, 15, 18, 20, 24, 27]
    assert trace.jobs.duration_s.tolist() == [3.0] * 10
    static = load_trace(spec, TraceOptions(arrivals="static"))
    assert static.jobs.arrival_s.tolist() == [0.0] * 10
    assert static.seed is None
    # A rate scales borrowed arrivals, too: ten jobs at 1 per second span nine seconds.
    scaled = load_trace(spec, TraceOptions(arrivals=f"trace:native:{other}", rate_per_s=1.0))
    assert scaled.jobs.arrival_s[-1] == pytest.approx(9.0, abs=1e-3)


def test_split_fills_absent_models_or_replaces_all_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,arrival_s,gpus,duration_s,iterations,model\na,0,1,,100,gnmt\nb,1,1,5,,\nc,2,1,6,,\n")
    spec = f"native:{path}"
    filled = load_trace(spec, classes=CLASSES, iteration_s=ITERATION_S)
    assert filled.jobs.model.tolist() == ["gnmt", "gnmt", "alexnet"]
    assert filled.jobs.iterations[0] == 100
    replaced = load_trace(spec, TraceOptions(split="100,0,0"), classes=CLASSES, iteration_s=ITERATION_S)
    assert replaced.jobs.model.tolist() == ["alexnet", "res18", "alexnet"]
    # The amount of work stays the same: 100 iterations of 2 s.
    assert replaced.jobs.duration_s.tolist() == [200.0, 5.0, 6.0]
    assert np.isnan(replaced.jobs.iterations).all()
    with pytest.raises(InputError, match="job 'a' states only iterations"):
        load_trace(spec, TraceOptions(split="100,0,0"), classes=CLASSES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (TraceOptions(from_s=5, to_s=5), "--from must be before --to"),
        (TraceOptions(from_s=5000), r"no jobs to run \(10 outside the window\)"),
        (TraceOptions(max_jobs=0), "at least 1 is needed"),
        (TraceOptions(rate_scale=0), "not above 0"),
        (TraceOptions(rate_scale=float("nan")), "not above 0"),
        (TraceOptions(gpu_counts="few"), "known: all, single, multi, as-single"),
        (TraceOptions(tenants=("c",)), "no tenant 'c'; the trace has a, b"),
        (TraceOptions(rate_per_s=1.0), "--rate needs --arrivals"),
        (TraceOptions(rate_per_s=1.0, arrivals="static"), "static arrivals have no rate"),
        (TraceOptions(arrivals="uniform"), "unknown arrivals 'uniform'"),
        (TraceOptions(arrivals="bursty:0"), "is not bursty:CV"),
        (TraceOptions(durations="lognormal:20min"), "is not lognormal:MEDIAN:SIGMA"),
        (TraceOptions(durations="lognormal:20parsec:1"), "unknown time unit 'parsec'"),
        (TraceOptions(durations="long"), "unknown durations 'long'"),
        (TraceOptions(gpu_mix="1:70,1:30"), "not GPUS:WEIGHT"),
        (TraceOptions(gpu_mix="1:0"), "all 0"),
        (TraceOptions(split="1,2"), "is not a split"),
        (TraceOptions(durations="two-part", seed=-1), "is not a seed"),
    ],
)
def test_bad_options(spec: str, options: TraceOptions, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_trace(spec, options, classes=CLASSES)
