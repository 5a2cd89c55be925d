"""Optimistic profiling: which runs are made, what is computed of memory, and the file that the simulator reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.profiles.training.optimistic import (
    CpuPoint,
    DataSet,
    profile_table,
    step_seconds,
    storage_need_mbps,
    sweep,
)
from cotenant.profiles.training.tables import load_profiles
from cotenant.training.timed import Pace, steps_per_iteration

SHIPPED = load_profiles()


class TestSweep:
    """Few real runs, where they matter."""

    def runs(self, step_s: Any, least: int = 1, most: int = 24, runs: int = 8) -> list[CpuPoint]:
        asked: list[int] = []

        def measure(cpus: int) -> float:
            assert cpus not in asked  # no point is measured twice
            asked.append(cpus)
            return float(step_s(cpus))

        return sweep(measure, least, most, 1, runs)

    def test_a_job_that_cores_do_not_help_costs_two_runs(self) -> None:
        assert [p.cpus for p in self.runs(lambda c: 0.1)] == [1, 24]

    def test_a_job_that_every_core_helps_costs_three(self) -> None:
        assert [p.cpus for p in self.runs(lambda c: 1 / c)] == [1, 12, 24]

    def test_a_knee_is_found(self) -> None:
        """Full speed from 6 cores on: between the points measured the table is within a tenth of the truth."""
        points = self.runs(lambda c: 0.6 / min(c, 6))
        speeds = np.interp(np.arange(1, 25), [p.cpus for p in points], [1 / p.step_s for p in points])
        truth = np.minimum(np.arange(1, 25), 6) / 0.6
        assert np.abs(speeds / truth - 1).max() < 0.1
        assert len(points) <= 8

    @pytest.mark.parametrize("model", SHIPPED.models)
    def test_shipped_models_come_out_again_from_eight_runs(self, model: str) -> None:
        profile = SHIPPED.models[model]
        points = self.runs(lambda c: profile.iteration_s / profile.speed(c, 250.0))
        at = np.arange(1, 25)
        speeds = np.interp(at, [p.cpus for p in points], [1 / p.step_s for p in points])
        truth = np.array([profile.speed(float(c), 250.0) / profile.iteration_s for c in at])
        assert np.abs(speeds / truth - 1).max() < 0.12

    def test_the_runs_are_bounded_and_a_single_core_is_one_run(self) -> None:
        assert len(self.runs(lambda c: 1 / c**0.5, runs=4)) == 4
        assert [p.cpus for p in self.runs(lambda c: 1.0, least=3, most=3)] == [3]


# 1000 steps of 0.1 s over 100 GB; the storage reads 500 MB/s, the memory 10 GB/s. With nothing cached, reading takes
# 200 s an epoch. With half cached it takes 5 s + 100 s, with six tenths 6 s + 80 s, which the 100 s of computing hide.
DATA = DataSet(100 * 10**9, 1000, 500.0, 10_000.0, 2 * 10**9)


def test_memory_is_computed_from_what_must_be_read() -> None:
    memory, seconds = step_seconds([CpuPoint(4, 0.1)], DATA)
    assert memory.tolist() == pytest.approx([2e9 + i * 10e9 for i in range(11)])
    assert seconds[0, [0, 5, 6, 10]].tolist() == pytest.approx([0.2, 0.105, 0.1, 0.1])


def test_storage_that_would_be_fast_enough() -> None:
    """Half cached: 50 GB in the 100 s less 5 s; nothing: 100 GB in 100 s is more than the 500 MB/s there are."""
    need = storage_need_mbps([CpuPoint(4, 0.1)], DATA)
    assert need[0, [0, 6, 10]].tolist() == pytest.approx([500.0, 40_000 / 94, 0.0])


def test_the_file_is_one_that_the_simulator_reads(tmp_path: Path) -> None:
    points = [CpuPoint(2, 0.2), CpuPoint(6, 0.1), CpuPoint(12, 0.05)]
    file = tmp_path / "p.json"
    file.write_text(json.dumps(profile_table("mine", points, 2.0, DATA)))
    model = load_profiles(file).models["mine"]
    assert model.cpus_per_gpu.tolist() == [1, 3, 6]
    assert model.iteration_s == pytest.approx(0.1)  # the base point has 3 cores per GPU and everything cached
    assert model.speed(6, 1000) == pytest.approx(2.0)
    assert model.speed(3, 1.0) == pytest.approx(0.5)  # with 1 GB per GPU nothing is cached
    assert model.speed(1, 1.0) == pytest.approx(0.5)  # preparing the data on one core takes longer than reading them


@given(cpus=st.floats(0.05, 40), memory=st.floats(0.5, 400), model=st.sampled_from(sorted(SHIPPED.models)))
def test_the_pretend_job_has_the_pace_that_the_simulator_computes(cpus: float, memory: float, model: str) -> None:
    from importlib import resources

    raw = json.loads(resources.files("cotenant.profiles").joinpath("data/synergy.json").read_text())
    profile = SHIPPED.models[model]
    assert Pace(raw, model).at(cpus, memory) == pytest.approx(profile.iteration_s / profile.speed(cpus, memory))


def test_iterations_are_cut_so_that_a_wish_to_leave_is_soon_heard() -> None:
    assert [steps_per_iteration(s) for s in (0.011, 0.05, 0.051, 0.6)] == [1, 1, 2, 12]


TIMED = [sys.executable, "-m", "cotenant.training.timed", "--iterations", "100000", "--time-scale", "0.02"]


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    from importlib import resources

    file = tmp_path / "shipped.json"
    file.write_text(resources.files("cotenant.profiles").joinpath("data/synergy.json").read_text())
    return file


@pytest.mark.timed
def test_profile_job_measures_a_real_program(call: Any, tmp_path: Path, shipped: Path) -> None:
    """alexnet on 1, 3, 6, 12 cores: 0.3, 1, 1.75, 2.94 times the speed at three (the shipped table)."""
    out = tmp_path / "measured.json"
    command = [*TIMED, "--profile", str(shipped), "--model", "alexnet"]
    code, printed, _ = call(
        "profile", "job", "--cpus", "1-12", "--pretend-cores", "--steps", "12", "--warm", "2", "--runs", "6",
        "--name", "mine", "--dataset", "20GB", "--storage-mbps", "1000", "--memory-mbps", "10000", "--json",
        "--out", out, "--", *command,
    )  # fmt: skip
    assert code == 0
    assert json.loads(printed)["runs"] <= 6
    model = load_profiles(out).models["mine"]
    for cpus, speed in ((1, 0.3), (3, 1.0), (6, 1.75), (12, 2.94)):
        assert model.speed(cpus, 100.0) / model.speed(3, 100.0) == pytest.approx(speed, rel=0.15)
    assert model.iteration_s / model.speed(3, 100.0) == pytest.approx(0.6 * 0.02, rel=0.1)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--cpus", "0-4"], "cpus"),
        (["--cpus", "many"], "cpus"),
        (["--cpus", "4-2"], "cpus"),
        (["--storage-mbps", "fast"], "storage-mbps"),
        (["--dataset", "nowhere/at/all"], "dataset"),
        (["--out", "/proc/none/p.json"], ""),
        (["--timeout", "soon"], "timeout"),
    ],
)
def test_wrong_options_are_one_sentence(call: Any, options: list[str], field: str) -> None:
    code, out, err = call("profile", "job", *options, "--", "true")
    assert (code, out) == (2, "")
    assert field in err
    assert len(err.strip().splitlines()) == 1


def test_a_program_without_the_loop_and_one_that_is_not_there(call: Any) -> None:
    code, _, err = call("profile", "job", "--", sys.executable, "-c", "print('hello')")
    assert code == 1
    assert "cotenant.loop" in err
    assert "hello" in err
    code, _, err = call("profile", "job", "--", "/no/such/program")
    assert code == 2
    assert "cannot be started" in err
    code, _, err = call("profile", "job", "--timeout", "1s", "--", sys.executable, "-c", "import time; time.sleep(60)")
    assert code == 1
    assert "more than 1 s" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "nobody"], "nobody"),
        (["--iterations", "-1"], "iterations"),
        (["--gpus", "nan"], "gpus"),
        (["--profile", "nowhere.json"], "cannot be read"),
    ],
)
def test_the_pretend_job_refuses_nonsense(shipped: Path, arguments: list[str], said: str) -> None:
    given = {"--profile": str(shipped), "--model": "gnmt", "--iterations": "1"} | dict([arguments])
    command = [sys.executable, "-m", "cotenant.training.timed", *(word for pair in given.items() for word in pair)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_table_that_does_not_fit_its_axes_is_said(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    model = {"iteration_s": 1.0, "throughput": [[1.0]]}
    file.write_text(json.dumps({"cpus_per_gpu": [1, 2], "memory_gb_per_gpu": [1], "models": {"m": model}}))
    command = [sys.executable, "-m", "cotenant.training.timed", "--profile", str(file), "--model", "m"]
    done = subprocess.run([*command, "--iterations", "1"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "is not a profile file" in done.stderr
