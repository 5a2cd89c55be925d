"""Compares the training engine with the plain-Python one on the same trace; large runs have processes of their own.

    python -m pytest -q -s bench/test_engine_bench.py                      # 1,000 and 100,000 jobs, growth
    COTENANT_BENCH_MILLION=1 python -m pytest -q -s bench/test_engine_bench.py -k million    # 1,000,000 and 10,000,000

Each prints one line with its figures and the command that gives it alone. `BENCH_GROWTH=FILE.csv` keeps the points of
the growth plot for plot_growth.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_cases import finish_times
from engine_oracle import Oracle

from cotenant.core.cluster import Cluster, NodeGroup
from cotenant.core.gpus import CATALOG
from cotenant.core.record.record import Record
from cotenant.core.work import Trace
from cotenant.policy.jobs.choice import JobPolicy
from cotenant.policy.jobs.ordering import ORDERINGS
from cotenant.profiles.training.tables import load_profiles
from cotenant.sim.jobs.engine import EngineOptions, run_training
from cotenant.workloads.jobs.generate import Workload, generate

PUBLIC = EngineOptions(speeds="two-speed", finish="lease-end")
PROFILES = load_profiles()
COMMAND = "python -m pytest -q -s bench/test_engine_bench.py -k"

LARGE = """
import json, resource, sys, time
from cotenant.core.cluster import Cluster, NodeGroup
from cotenant.core.gpus import CATALOG
from cotenant.policy.jobs.choice import JobPolicy
from cotenant.profiles.training.tables import load_profiles
from cotenant.sim.jobs.engine import EngineOptions, run_training
from cotenant.workloads.jobs.generate import Workload, generate

jobs, nodes, allotment, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
cluster = Cluster((NodeGroup(nodes, 8, CATALOG["A100-40GB"], 24, 500 * 10**9),))
profiles = load_profiles()
policy = JobPolicy("fifo", allotment)
def traced(n):
    return generate(Workload(n, load=0.9, cluster_gpus=8 * nodes), profiles.classes, profiles.iteration_s).trace
run_training(traced(50), cluster, profiles, policy, EngineOptions())  # compiles, or loads what was compiled
trace = traced(jobs)
started = time.perf_counter()
record, outcome = run_training(trace, cluster, profiles, policy, EngineOptions(), out=out)
print(json.dumps({
    "engine_s": outcome.engine_s,
    "run_s": time.perf_counter() - started,
    "rounds": record.rounds.height,
    "active_mean": float((record.rounds["running"] + record.rounds["waiting"]).mean()),
    "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
}))
"""


def nodes(count: int) -> Cluster:
    return Cluster((NodeGroup(count, 8, CATALOG["A100-40GB"], 24, 500 * 10**9),))


def trace_of(jobs: int, gpus: int, load: float = 0.9, **more: Any) -> Trace:
    workload = Workload(jobs, load=load, cluster_gpus=gpus, **more)
    return generate(workload, PROFILES.classes, PROFILES.iteration_s).trace


def best_engine_s(trace: Trace, cluster: Cluster, policy: JobPolicy, options: EngineOptions, times: int) -> float:
    return min(run_training(trace, cluster, PROFILES, policy, options)[1].engine_s for _ in range(times))


@pytest.mark.parametrize("allotment", ["proportional", "tune"])
def test_a_thousand_jobs_on_128_gpus(allotment: str) -> None:
    """The shape of the public simulator's own benchmark: single-GPU jobs, 8 an hour, rounds of 300 s."""
    workload = Workload(1000, rate_per_s=8 / 3600, gpu_mix="1:100")
    trace = generate(workload, PROFILES.classes, PROFILES.iteration_s).trace
    policy = JobPolicy("fifo", allotment)
    record, first = run_training(trace, nodes(16), PROFILES, policy, PUBLIC)
    engine_s = min(first.engine_s, best_engine_s(trace, nodes(16), policy, PUBLIC, 5))
    started = time.perf_counter()
    oracle = Oracle(trace, nodes(16), PROFILES, policy, PUBLIC).run()
    plain_s = time.perf_counter() - started
    assert finish_times(record) == [j.finish_s for j in oracle.jobs]
    print(
        f"\n1,000 jobs, 128 GPUs, fifo + {allotment}: engine {engine_s:.3f} s, plain Python {plain_s:.1f} s "
        f"(ratio {plain_s / engine_s:.0f}), {record.rounds.height} rounds   [{COMMAND} 'a_thousand and {allotment}']"
    )
    assert engine_s < 0.1
    assert plain_s / engine_s > 50


def large(jobs: int, count: int, allotment: str, out: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", LARGE, str(jobs), str(count), allotment, str(out)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def tell(jobs: int, count: int, allotment: str, got: dict[str, float], word: str) -> None:
    print(
        f"\n{jobs:,} jobs, {8 * count:,} GPUs, fifo + {allotment}: engine {got['engine_s']:.2f} s, whole run "
        f"{got['run_s']:.2f} s, {got['rounds']:,.0f} rounds of {got['active_mean']:,.0f} jobs, "
        f"peak {got['peak_gib']:.2f} GiB   [{COMMAND} '{word} and {allotment}']"
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("allotment", ["proportional", "tune"])
def test_a_hundred_thousand_jobs_on_2048_gpus(allotment: str, tmp_path: Path) -> None:
    got = large(100_000, 256, allotment, tmp_path / "run")
    tell(100_000, 256, allotment, got, "hundred")
    assert got["engine_s"] < 10


@pytest.mark.timeout(1800)
@pytest.mark.skipif("COTENANT_BENCH_MILLION" not in os.environ, reason="minutes; COTENANT_BENCH_MILLION=1 runs it")
@pytest.mark.parametrize("allotment", ["proportional", "tune"])
def test_a_million_jobs_on_10000_gpus(allotment: str, tmp_path: Path) -> None:
    got = large(1_000_000, 1250, allotment, tmp_path / "run")
    tell(1_000_000, 1250, allotment, got, "million")
    assert got["engine_s"] < 120
    assert got["peak_gib"] < 4


@pytest.mark.timeout(7200)
@pytest.mark.skipif("COTENANT_BENCH_MILLION" not in os.environ, reason="minutes; COTENANT_BENCH_MILLION=1 runs it")
def test_ten_million_jobs_on_100000_gpus(tmp_path: Path) -> None:
    """`cotenant simulate` with its defaults, from the file of the trace to the figures."""
    trace, cotenant = tmp_path / "trace.parquet", [sys.executable, "-m", "cotenant"]
    drawn = ["--jobs", "10000000", "--load", "0.9", "--cluster", "12500x8", "--out", str(trace)]
    subprocess.run([*cotenant, "trace", "generate", *drawn], check=True, stdout=subprocess.DEVNULL)
    line = [
        *cotenant,
        "simulate",
        "--trace",
        str(trace),
        "--cluster",
        "12500x8",
        "--out",
        str(tmp_path / "run"),
        "--json",
    ]
    with (tmp_path / "figures.json").open("w") as out:
        run = subprocess.Popen(line, stdout=out)
        _, status, used = os.wait4(run.pid, 0)
    run.returncode = os.waitstatus_to_exitcode(status)
    assert run.returncode == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["jobs_completed"] == 10_000_000
    cpu_s, peak_gib = used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20
    print(
        f"\n10,000,000 jobs, 100,000 GPUs, defaults: engine {figures['engine_s']:.0f} s, processor time of the whole "
        f"command {cpu_s:.0f} s, {figures['rounds']:,} rounds, peak {peak_gib:.2f} GiB   [{COMMAND} ten_million]"
    )
    assert cpu_s < 1200
    assert peak_gib < 5


def processor_time(trace: Trace, cluster: Cluster, policy: JobPolicy, options: EngineOptions) -> tuple[Record, float]:
    """Run a simulation. Returns its result and its CPU seconds after the input was read; wall times vary on a busy
    machine."""
    begun: list[float] = []
    record, _ = run_training(
        trace, cluster, PROFILES, policy, options, on_ready=lambda: begun.append(time.process_time())
    )
    return record, time.process_time() - begun[0]


POLICIES = [
    *(JobPolicy(ordering, "tune") for ordering in ORDERINGS),
    JobPolicy("fifo", "proportional"), JobPolicy("fifo", "greedy"),
    JobPolicy("fifo", "tune", "consolidate"), JobPolicy("fifo", "tune", "spread"),
    JobPolicy("fifo", "tune", sticky=True), JobPolicy("fifo", "optimal"),
]  # fmt: skip
SIZES = (1000, 2000, 4000, 8000, 16000)
POINTS = [*((jobs, 16) for jobs in SIZES), *((jobs, jobs // 1000 * 16) for jobs in SIZES[1:])]
FEW_POINTS = [(500, 16), (1000, 16), (2000, 16), (2000, 32), (4000, 64)]  # an integer program in most rounds


@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", POLICIES, ids=JobPolicy.label)
def test_time_grows_with_rounds_times_active_jobs(policy: JobPolicy) -> None:
    """More rounds on the same cluster, then more jobs at once on larger ones. Near-linear: the exponent of the best
    power law of processor time over rounds x unfinished jobs."""
    options, name = EngineOptions(record_placements=False), policy.label()
    points = []
    for jobs, count in FEW_POINTS if policy.allotment == "optimal" else POINTS:
        trace = trace_of(jobs, 8 * count)
        runs = [processor_time(trace, nodes(count), policy, options) for _ in range(3)]
        record, engine_s = min(runs, key=lambda run: run[1])
        points.append((int((record.rounds["running"] + record.rounds["waiting"]).sum()), engine_s))
    works, seconds = np.array(sorted(points)).T
    exponent = float(np.polyfit(np.log(works), np.log(seconds), 1)[0])
    per_job = ", ".join(f"{s / w * 1e9:.0f}" for w, s in sorted(points))
    print(
        f"\ngrowth, {name}, rounds x unfinished jobs from {works.min():,.0f} to {works.max():,.0f}: "
        f"exponent {exponent:.2f}; ns per job and round: {per_job}   [{COMMAND} grows]"
    )
    if "BENCH_GROWTH" in os.environ and name == "fifo + tune":
        lines = ["rounds_x_jobs,engine_s", *(f"{w},{s:.6f}" for w, s in sorted(points))]
        Path(os.environ["BENCH_GROWTH"]).write_text("\n".join(lines) + "\n")
    # 1 means linear and 2 quadratic growth; the limit is wide because measurements vary on a busy machine
    assert exponent < 1.5
