"""A reservation holds also where running jobs keep their GPUs, and until the job ends."""

from __future__ import annotations

import numpy as np
import pytest
from engine_cases import ORDERINGS, PROFILES, clusters, traces
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cotenant.core.cluster import Cluster, NodeGroup
from cotenant.core.errors import WorkError
from cotenant.core.events import Kind, Reason
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


def test_a_starving_gang_runs_to_its_end() -> None:
    """Worked out by hand: `gang` runs to 300 s; then jobs of one lease, each with less service, come every 300 s.
    1200 s after 300 s are first exceeded at 1800 s; from there it does its other 2700 s, to 4500 s."""
    jobs = Jobs.build(
        31, id=["gang", *(f"n{i}" for i in range(30))], arrival_s=[0.0, *(100.0 + 300.0 * i for i in range(30))],
        gpus=[2.0] * 31, duration_s=[3000.0] + [300.0] * 30, model=["res18"] * 31,
    )  # fmt: skip
    node = Cluster((NodeGroup(1, 2, find_gpu("A100-40GB"), 6, 125 * 10**9),))
    policy = JobPolicy("las", "proportional", reserve_after_s=1200.0)
    e = run_training(Trace(jobs, "hand"), node, load_profiles(), policy, EngineOptions())[0].events
    mine = (e.job == 0) & np.isin(e.kind, [Kind.START, Kind.PREEMPT, Kind.RESUME, Kind.FINISH])
    told = list(zip(e.kind[mine].tolist(), e.time_s[mine].tolist(), strict=True))
    assert told == [(Kind.START, 0.0), (Kind.PREEMPT, 300.0), (Kind.RESUME, 1800.0), (Kind.FINISH, 4500.0)]


@pytest.mark.parametrize("sticky", [False, True])
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_started_by_a_reservation_neither_stops_nor_moves(sticky: bool, data: st.DataObject) -> None:
    cluster = data.draw(clusters())
    trace = data.draw(traces(cluster))
    policy = JobPolicy(data.draw(st.sampled_from(ORDERINGS)), "tune", sticky=sticky, reserve_after_s=900.0)
    try:
        e = run_training(trace, cluster, PROFILES, policy, EngineOptions(record_placements=True))[0].events
    except WorkError:
        assume(False)
    reserved: set[int] = set()
    for job, kind, reason in zip(e.job.tolist(), e.kind.tolist(), e.reason.tolist(), strict=True):
        if kind in (Kind.START, Kind.RESUME) and reason == Reason.RESERVED:
            reserved.add(job)
        if kind in (Kind.PREEMPT, Kind.MOVE):
            assert job not in reserved
