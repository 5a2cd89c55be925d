"""Measures the speed of the MIG optimizer compared with trying all permutations, and the gain of each policy over whole
GPUs.

pytest -q -s bench/test_mig_bench.py
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import pytest

from cotenant.core.cluster import Cluster, NodeGroup
from cotenant.core.gpus import find_gpu
from cotenant.core.metrics.summary import summarise
from cotenant.core.mig import Geometry, geometry, maximal_multisets, parse_layout
from cotenant.core.work import Jobs, Trace
from cotenant.policy.mig.decide import PartitionRules
from cotenant.policy.mig.optimizer import best_partition
from cotenant.profiles.mig.workloads import workloads
from cotenant.sim.mig.run import best_static, run_partition
from cotenant.workloads.jobs.miso import read
from cotenant.workloads.trace_options import TraceOptions

REFERENCE = {"trace_g8_j100_a60_s1": 8, "trace_g8_j1000_a100_s1": 8, "trace_g40_j1000_a10_s1": 40}


def permutations(geo: Geometry, speeds: np.ndarray) -> float:
    """The baseline: try every multiset of as many slices as jobs, with every order of the jobs."""
    best = -np.inf
    for kinds in maximal_multisets(geo):
        if len(kinds) != len(speeds):
            continue
        index = [geo.kinds.index(k) for k in kinds]
        for order in itertools.permutations(range(len(speeds))):
            best = max(best, sum(speeds[j, k] for j, k in zip(order, index, strict=True)))
    return best


@pytest.mark.parametrize("gpu", ["A100-40GB", "H100-80GB"])
def test_optimizer_against_permutations(gpu: str) -> None:
    geo, rng = geometry(gpu), np.random.default_rng(0)
    print(f"\n{gpu}: microseconds per decision")
    for jobs in range(1, 8):
        tables = [rng.random((jobs, len(geo.kinds))) for _ in range(300)]
        best_partition(geo, tables[0])
        begin = time.process_time()
        for table in tables:
            best_partition(geo, table)
        ours = (time.process_time() - begin) / len(tables) * 1e6
        begin = time.process_time()
        repeat = 1 if jobs > 5 else 5
        for table in tables[:repeat]:
            permutations(geo, table)
        theirs = (time.process_time() - begin) / repeat * 1e6
        print(f"  {jobs} jobs: {ours:7.1f}   permutations {theirs:10.0f}   ratio {theirs / ours:8.0f}")


def measure(trace: object, gpus: int, gpu: str, rules: PartitionRules, seed: int = 1) -> tuple[float, float, dict]:
    cluster = Cluster((NodeGroup(max(gpus // 8, 1), min(gpus, 8), find_gpu(gpu), 24, 500 * 10**9),))
    begin = time.process_time()
    record, outcome = run_partition(trace, cluster, rules, seed=seed)  # type: ignore[arg-type]
    return float(summarise(record)["jct_s"]["mean"]), time.process_time() - begin, outcome.extra()


@pytest.mark.parametrize("gpu", ["A100-40GB", "H100-80GB"])
@pytest.mark.parametrize("name", list(REFERENCE))
def test_policies_against_whole_gpus(shared: Path, name: str, gpu: str) -> None:
    trace, gpus = read(str(shared / f"reference/miso/{name}.csv"), TraceOptions()), REFERENCE[name]
    cluster = Cluster((NodeGroup(gpus // 8, 8, find_gpu(gpu), 24, 500 * 10**9),))
    best, _ = best_static(trace, cluster, PartitionRules("whole"))
    variants = {
        "whole": PartitionRules("whole"),
        "mps": PartitionRules("mps"),
        "static (best)": best,
        "miso": PartitionRules("miso"),
        "miso-perfect": PartitionRules("miso-perfect"),
        "miso, all measured": PartitionRules("miso", profile_after_s=0.0),
        "miso, public rules": PartitionRules(
            "miso", profile_after_s=0.0, disturb="all", placement="least-loaded", horizon_s=1e9
        ),
        "oracle": PartitionRules("oracle"),
        "oracle, disturb all": PartitionRules("oracle", disturb="all"),
        "oracle, no overheads": PartitionRules("oracle", overheads=False),
    }
    print(f"\n{name} on {gpus} {gpu}: mean JCT s, ratio to whole, CPU s, counts")
    whole = 0.0
    for label, rules in variants.items():
        mean, cpu_s, extra = measure(trace, gpus, gpu, rules)
        whole = whole or mean
        print(f"  {label:22s} {mean:8.0f} {mean / whole:6.3f} {cpu_s:6.2f}  {extra}")


def test_cost_of_prediction_errors(shared: Path) -> None:
    """Compares miso with miso-perfect on the reference traces, each with five draws of the prediction errors."""
    print("\nmean JCT of miso over that of miso-perfect")
    for name, gpus in REFERENCE.items():
        trace = read(str(shared / f"reference/miso/{name}.csv"), TraceOptions())
        perfect, _, _ = measure(trace, gpus, "A100-40GB", PartitionRules("miso-perfect"))
        drawn = [measure(trace, gpus, "A100-40GB", PartitionRules("miso"), seed)[0] for seed in range(1, 6)]
        low, high = min(drawn) / perfect, max(drawn) / perfect
        print(f"  {name}: {np.mean(drawn) / perfect:.4f} (from {low:.4f} to {high:.4f})")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["whole", "static", "mps", "miso", "oracle"])
def test_growth_of_runs(policy: str) -> None:
    """More jobs on as many more GPUs, with the same load for each GPU; processor time and the exponent of a fit."""
    sizes, times, table = [200, 400, 800, 1600, 3200], [], workloads()
    gap_s = 3400.0 if policy == "whole" else 1200.0  # on one GPU; a job takes 3,060 s alone
    static = parse_layout(geometry("A100-40GB"), "3,2,2")
    for jobs in sizes:
        rng, gpus = np.random.default_rng(jobs), jobs // 10
        trace = Trace(
            Jobs.build(
                jobs, id=[str(i) for i in range(jobs)], gpus=np.ones(jobs), model=rng.choice(list(table), jobs),
                arrival_s=np.cumsum(rng.exponential(gap_s / gpus, jobs)), duration_s=rng.uniform(120, 6000, jobs),
            ),
            "drawn", seed=jobs,
        )  # fmt: skip
        rules = PartitionRules(policy, layout=static) if policy == "static" else PartitionRules(policy)
        times.append(min(measure(trace, gpus, "A100-40GB", rules)[1] for _ in range(2)))
    exponent = np.polyfit(np.log(sizes), np.log(times), 1)[0]
    shown = ", ".join(f"{seconds:.2f}" for seconds in times)
    print(f"\n{policy}: {shown} s for {', '.join(map(str, sizes))} jobs; growth exponent {exponent:.2f}")
    assert exponent < 2.5
