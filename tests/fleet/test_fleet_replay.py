"""A trace run for real by pretend jobs against its simulation; full figures: bench/test_fleet_bench.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotenant.core.errors import InputError
from cotenant.core.record.reader import read_record
from cotenant.core.work import Jobs, Trace
from cotenant.fleet.controller.planners import cluster_of
from cotenant.fleet.replay import Outcome, ReplayOptions, _options, measure_profiles, steadied, whole_iterations
from cotenant.fleet.session import node_specs
from cotenant.profiles.training.tables import load_profiles


@pytest.fixture
def smoke(call: Any, tmp_path: Path) -> Path:
    file = tmp_path / "smoke.csv"
    code, _, _ = call("trace", "generate", "--like", "fleet-smoke", "--jobs", "7", "--seed", "5", "--out", file)
    assert code == 0
    return file


@pytest.mark.timed
def test_a_short_trace_runs_as_simulated(call: Any, tmp_path: Path, smoke: Path) -> None:
    """A fifteenth of the time: jobs of one to eight seconds, where starting a program is a fifth of the work; so the
    bounds are wide. Nobody is preempted, in either."""
    out = tmp_path / "records"
    code, printed, err = call(
        "fleet", "replay", f"native:{smoke}", "--nodes", "2", "--ordering", "fifo", "--allotment", "tune", "--lease",
        "1s", "--time-scale", "0.066", "--executor", "local", "--out", out, "--json",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(printed)
    assert found["jobs"] == 7
    assert abs(found["mean_error"]) < 0.4
    assert found["median_job_error"] < 0.5
    measured, simulated = read_record(out / "measured"), read_record(out / "simulated")
    assert (measured.info.executor, simulated.info.executor) == ("fleet", "sim")
    assert measured.job("model").tolist() == simulated.job("model").tolist()
    assert np.isclose(
        found["measured_mean_jct_s"] / found["simulated_mean_jct_s"] - 1, found["mean_error"], rtol=1e-9, atol=1e-9
    )


@pytest.mark.timed
def test_measured_profiles_are_those_that_the_jobs_were_told(tmp_path: Path) -> None:
    """res18 at 1, 3, 5 cores is 0.37, 1, 1.53 times as fast as at three (the shipped table), in a tenth of the time."""
    options = ReplayOptions(time_scale=0.1, nodes=2)
    told = load_profiles()
    cluster = cluster_of(node_specs(_options(options, tmp_path, told)))
    jobs = Jobs.build(1, id=["a"], arrival_s=[0.0], gpus=[1.0], duration_s=[30.0], model=["res18"])
    profiles, off = measure_profiles(jobs, options, cluster)
    profile = profiles.models["res18"]
    for cores, speed in ((1, 0.37), (3, 1.0), (5, 1.53)):
        assert profile.speed(cores, 62.5) / profile.speed(3, 62.5) == pytest.approx(speed, rel=0.1)
    assert profile.iteration_s / profile.speed(3, 62.5) == pytest.approx(0.064, rel=0.05)
    assert 0 <= off < 0.1


def test_a_busy_machine_is_measured_again_and_said() -> None:
    """A pace of 50 ms: one measurement that is 20 % off is forgotten when the next is not; three in a row are told."""
    tries = iter([0.060, 0.051])
    assert steadied(lambda: next(tries), 0.05) == (0.051, pytest.approx(0.02))
    tries = iter([0.060, 0.040, 0.055, 0.05])
    step_s, error = steadied(lambda: next(tries), 0.05)
    assert (step_s, error) == (0.055, pytest.approx(0.1))
    nothing: Any = None
    assert Outcome(nothing, nothing, 0.0, 0.02).doubts() == []
    (said,) = Outcome(nothing, nothing, 0.0, error).doubts()
    assert "up to 10% off their target speed" in said


def test_work_becomes_whole_iterations_at_the_proportional_share(tmp_path: Path) -> None:
    """alexnet takes 0.6 s per iteration at three cores per GPU: 31 s are 52 iterations; arrivals are scaled."""
    options = ReplayOptions(time_scale=0.5)
    cluster = cluster_of(node_specs(_options(options, tmp_path, load_profiles())))
    jobs = Jobs.build(
        2, id=["a", "b"], arrival_s=[0.0, 8.0], gpus=[1.0, 2.0], duration_s=[31.0, 0.1], model=["alexnet", "gnmt"]
    )
    whole = whole_iterations(Trace(jobs, "made"), cluster, load_profiles(), 0.5)
    assert whole.iterations.tolist() == [52.0, 1.0]
    assert whole.arrival_s.tolist() == [0.0, 4.0]
    assert np.isnan(whole.duration_s).all()
    part = Jobs.build(1, id=["a"], arrival_s=[0.0], gpus=[0.5], duration_s=[31.0], model=["gnmt"])
    with pytest.raises(InputError, match="fractions of a GPU"):
        whole_iterations(Trace(part, "made"), cluster, load_profiles(), 1.0)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--time-scale", "0"], "time-scale"),
        (["--lease", "0.1s"], "lease"),
        (["--executor", "slurm"], "executor"),
        (["--ordering", "lifo"], "ordering"),
        (["--memory-per-node", "much"], "memory-per-node"),
        (["--profiles", "nowhere.json"], "nowhere.json"),
        (["--out", "/proc/none"], ""),
    ],
)
def test_wrong_options_are_one_sentence(call: Any, smoke: Path, options: list[str], field: str) -> None:
    code, out, err = call("fleet", "replay", f"native:{smoke}", *options)
    assert (code, out) == (2, "")
    assert field in err
    assert len(err.strip().splitlines()) == 1


def test_what_a_start_cost_is_read_off_the_record() -> None:
    """Two jobs of ten seconds of work at leases of ten seconds. The first starts 0.2 s into its round and holds 10.5 s;
    the second starts 0.4 s into its round at half speed, is stopped after 9.6 s, starts again at 20.4 s and ends at
    31.8 s: 21 s held, 20 needed, 0.5 s per start. Median beyond work 0.5 s, median delay 0.4 s."""
    from cotenant.core.events import Kind
    from cotenant.core.record.record import jobs_table
    from cotenant.core.record.schema import RunInfo
    from cotenant.core.record.writer import RecordWriter
    from cotenant.fleet.replay import start_costs_s

    jobs = Jobs.build(2, id=["a", "b"], arrival_s=[0.0, 0.0], gpus=[1.0, 1.0], duration_s=[10.0, 10.0])
    rows = [
        (0.2, 0, Kind.START, 1.0), (0.4, 1, Kind.START, 0.5), (10.0, 1, Kind.PREEMPT, 0.0), (10.7, 0, Kind.FINISH, 0.0),
        (20.4, 1, Kind.RESUME, 0.5), (31.8, 1, Kind.FINISH, 0.0),
    ]  # fmt: skip
    with RecordWriter(None, RunInfo("made", placements=False), jobs_table(jobs)) as writer:
        writer.append_events(
            time_s=[r[0] for r in rows], job=[r[1] for r in rows], kind=[r[2] for r in rows], reason=[0] * len(rows),
            cpu_milli=[1000] * len(rows), memory_mb=[1] * len(rows), speed=[r[3] for r in rows],
        )  # fmt: skip
        record = writer.close()
    # the start delays are 0.2, 0.4 and 0.4 s, with a median of 0.4 s
    assert start_costs_s(record, 10.0, np.array([False, False])).tolist() == pytest.approx([0.9, 0.9])
    assert start_costs_s(record, 10.0, np.array([True, True])).tolist() == pytest.approx([0.9, 0.9])


def test_a_first_start_costs_time_and_no_work() -> None:
    """transformer takes 0.67 s per iteration at any cores: 30 of them 20.1 s, after 2.5 s of starting. Under srtf the
    shorter of two jobs goes first, whatever it takes to start."""
    from cotenant.core.cluster import Cluster, NodeGroup
    from cotenant.core.gpus import find_gpu
    from cotenant.core.metrics.summary import Analysis
    from cotenant.sim.jobs.options import TrainingConfig
    from cotenant.sim.jobs.training import simulate

    cluster = Cluster((NodeGroup(1, 1, find_gpu("A100-40GB"), 3, 62_500_000_000),), "one GPU")
    jobs = Jobs.build(
        2, id=["a", "b"], arrival_s=[0.0, 0.0], gpus=[1.0, 1.0], iterations=[30.0, 31.0], model=["transformer"] * 2
    )
    config = TrainingConfig(ordering="srtf", lease=10.0, restart_cost=1.0)
    record, _ = simulate(Trace(jobs, "made"), cluster, config, launch_s=np.array([2.5, 0.5]))
    # b waits for the round after a's end, and its own start takes 0.5 s
    assert Analysis(record).jobs.jct_s.tolist() == pytest.approx([22.6, 30.0 + 0.5 + 31 * 0.67])
