"""Compares the real fleet with its simulation, by pretended jobs on pretended GPUs (docs/benchmarks/fleet-fidelity.md).

By default: 20 jobs in half of their time under three policies, local executor, six minutes. COTENANT_BENCH_FULL=1:
40 jobs in full under fifo, srtf, las with proportional and tune, local and over Ray, two of the jobs training in
PyTorch; about 75 minutes.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from cotenant.fleet.replay import Outcome, ReplayOptions, replay
from cotenant.profiles.training.tables import load_profiles
from cotenant.workloads.jobs.generate import Workload, generate

FULL = os.environ.get("COTENANT_BENCH_FULL") == "1"
JOBS, TIME_SCALE, LEASE_S = (40, 1.0, 10.0) if FULL else (20, 0.5, 5.0)
COMBINATIONS = (
    [(ordering, allotment) for allotment in ("proportional", "tune") for ordering in ("fifo", "srtf", "las")]
    if FULL
    else [("fifo", "proportional"), ("fifo", "tune"), ("las", "tune")]
)
EXECUTORS = ["local", *(["ray"] if FULL and importlib.util.find_spec("ray") else [])]
MEAN, P90 = 0.05, 0.10


def run(ordering: str, allotment: str, executor: str, out: Path) -> Outcome:
    profiles = load_profiles()
    trace = generate(Workload(JOBS, like="fleet-smoke", seed=3), profiles.classes, profiles.iteration_s).trace
    torch_jobs = 2 if FULL and importlib.util.find_spec("torch") else 0
    options = ReplayOptions(
        ordering=ordering, allotment=allotment, executor=executor, time_scale=TIME_SCALE, lease_s=LEASE_S,
        torch_jobs=torch_jobs,
    )  # fmt: skip
    return replay(trace, options, out=out)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_simulation_foretells_the_fleet(executor: str, tmp_path: Path) -> None:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    print(f"\n{JOBS} jobs, 4 nodes of 2 pretend GPUs and 6 cores, leases of {LEASE_S:g} s, {executor} executor")
    print("| policy | measured mean JCT [s] | simulated | mean error | median of jobs | p90 of jobs | start [s] |")
    print("|---|---|---|---|---|---|---|")
    for ordering, allotment in COMBINATIONS:
        row = run(ordering, allotment, executor, tmp_path / f"{ordering}-{allotment}").summary()
        found[ordering, allotment] = row
        print(
            f"| {ordering} + {allotment} | {row['measured_mean_jct_s']:.1f} | {row['simulated_mean_jct_s']:.1f} "
            f"| {row['mean_error']:+.1%} | {row['median_job_error']:.1%} | {row['p90_job_error']:.1%} "
            f"| {row['start_s']:.2f} |",
            flush=True,
        )
    for name, row in found.items():
        assert abs(row["mean_error"]) <= MEAN, name
        assert row["p90_job_error"] <= P90, name
    for ordering in {ordering for ordering, _ in COMBINATIONS}:
        both = [found.get((ordering, allotment)) for allotment in ("proportional", "tune")]
        if all(both):
            real, model = ([row[key] for row in both if row] for key in ("measured_mean_jct_s", "simulated_mean_jct_s"))
            print(f"{ordering}: tune is {real[0] / real[1]:.3f} times as fast, simulated {model[0] / model[1]:.3f}")
            assert real[0] / real[1] == pytest.approx(model[0] / model[1], rel=0.05)
