"""A reservation holds also where running jobs keep their GPUs."""

from __future__ import annotations

import numpy as np

from cotenant.core.cluster import Cluster, NodeGroup
from cotenant.core.events import Kind
from cotenant.core.gpus import find_gpu
from cotenant.core.work import Jobs, Trace
from cotenant.policy.jobs.choice import JobPolicy
from cotenant.profiles.training.tables import load_profiles
from cotenant.sim.jobs.engine import EngineOptions, run_training

SMALL = 120


def stream(big: dict[str, float | str], small_s: float, small_cpus: float) -> Trace:
    """A job of 4 GPUs that comes at 3300 s into a stream of small ones, of which some always run."""
    jobs = Jobs.build(
        SMALL + 1,
        id=["big", *(f"s{i}" for i in range(SMALL))],
        arrival_s=[3300.0, *(i * 500.0 for i in range(SMALL))],
        gpus=[4.0] + [1.0] * SMALL,
        duration_s=[3000.0] + [small_s] * SMALL,
        model=["res18"] * (SMALL + 1),
        cpus=[float(big.get("cpus", np.nan))] + [small_cpus] * SMALL,
        gpu_models=[str(big.get("gpu_models", ""))] + [""] * SMALL,
    )
    return Trace(jobs.take(np.argsort(jobs.arrival_s, kind="stable")), "stream")


def start(trace: Trace, groups: list[NodeGroup], allotment: str, reserve_after_s: float) -> float:
    policy = JobPolicy("fifo", allotment, sticky=True, reserve_after_s=reserve_after_s)
    events = run_training(trace, Cluster(tuple(groups)), load_profiles(), policy, EngineOptions())[0].events
    row = trace.jobs.id.tolist().index("big")
    return float(events.time_s[(events.job == row) & (events.kind == Kind.START)][0])


def test_small_jobs_on_the_only_gpus_it_accepts() -> None:
    """Small jobs go to the first node, the only one of its model. 3600 s after 3300 s are first exceeded at 7200 s."""
    trace = stream({"gpu_models": "V100-16GB"}, 3000.0, np.nan)
    groups = [NodeGroup(1, 4, find_gpu(gpu), 12, 250 * 10**9) for gpu in ("V100-16GB", "A100-40GB")]
    assert start(trace, groups, "proportional", 3600.0) == 7200.0
    assert start(trace, groups, "proportional", np.inf) > SMALL * 500.0


def test_small_jobs_with_the_cpu_it_needs() -> None:
    """The big job wants all 24 cores, each small one 6; four of them always run."""
    trace = stream({"cpus": 24.0}, 2000.0, 6.0)
    node = [NodeGroup(1, 8, find_gpu("A100-40GB"), 24, 500 * 10**9)]
    assert start(trace, node, "greedy", 3600.0) == 7200.0
    assert start(trace, node, "greedy", np.inf) > SMALL * 500.0
