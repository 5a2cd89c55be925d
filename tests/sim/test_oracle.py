"""The compiled engine against the plain-Python one, job by job, on random inputs, for every combination of policies."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any
from unittest import mock

import numpy as np
import pytest
from engine_cases import (
    ALLOTMENTS,
    ORDERINGS,
    PLACEMENTS,
    PROFILES,
    changes,
    clusters,
    crowded_case,
    finish_times,
    options,
    traces,
)
from engine_oracle import Job, Level, Oracle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cotenant.core.cluster import Cluster, NodeGroup
from cotenant.core.errors import WorkError
from cotenant.core.gpus import CATALOG
from cotenant.core.work import Jobs, Trace
from cotenant.policy.jobs.arrays import DOWN, IDEAL, JOB, PROPORTIONAL
from cotenant.policy.jobs.choice import JobPolicy
from cotenant.policy.jobs.demand import build_workload
from cotenant.policy.jobs.optimal import LevelChooser
from cotenant.sim.jobs import engine
from cotenant.sim.jobs.engine import EngineOptions, run_training

FUZZ = settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


class Wants:
    """The levels that the program of allotment `optimal` chose: of equally good answers, or where its time was up,
    the oracle takes those that the engine got."""

    def __init__(self, chooser: LevelChooser, trace: Trace, cluster: Cluster, options: EngineOptions) -> None:
        self.chooser = chooser
        self.jobs = np.zeros(len(trace.jobs), JOB)
        self.jobs["type"] = build_workload(
            trace.jobs, PROFILES, cluster, two_speed=options.speeds == "two-speed", grid=True
        ).type

    def __call__(self, oracle: Oracle, order: list[Job]) -> None:
        for job in order:
            job.wanted = "ideal"
        chosen = oracle.prefix(order)
        self.chooser.choose(np.array([j.number for j in chosen]), self.jobs)
        for job in chosen:
            job.wanted = self.level(int(self.jobs["wanted"][job.number]), job)

    def level(self, code: int, job: Job) -> Level:
        named = {int(PROPORTIONAL): "proportional", int(IDEAL): "ideal", int(DOWN): "down"}
        if code in named:
            return named[code]
        amount = self.chooser.demand.amount[code, self.jobs["type"][job.number], 0]
        assert amount["cpu"] <= job.ideal[0]
        assert amount["memory"] <= job.ideal[1]
        return int(amount["cpu"]), int(amount["memory"])


def check(trace: Trace, cluster: Cluster, policy: JobPolicy, options: EngineOptions) -> None:
    """Run both; every job must end at the same time and, where it is recorded, hold the same on the way."""
    choosers: list[LevelChooser] = []
    record, error = None, ""

    def keep(*args: Any) -> LevelChooser:
        choosers.append(LevelChooser(*args))
        return choosers[-1]

    with mock.patch.object(engine, "LevelChooser", keep):
        try:
            record, _ = engine.run_training(trace, cluster, PROFILES, policy, options)
        except WorkError as raised:
            error = str(raised)
    wants = Wants(choosers[0], trace, cluster, options) if policy.allotment == "optimal" else None
    oracle = Oracle(trace, cluster, PROFILES, policy, options, wants).run()
    never = [j for j in oracle.jobs if j.finish_s is None]
    assert error.startswith(f"{len(never)} jobs can never run" if never else "")
    assert (record is None) == bool(never)
    if record is None:
        return
    np.testing.assert_allclose(finish_times(record), [j.finish_s for j in oracle.jobs], rtol=1e-9)
    if not options.record_placements:
        return
    for job, told in zip(oracle.jobs, changes(record), strict=True):
        assert [c[1:] for c in told[:-1]] == [c[1:] for c in job.log]
        np.testing.assert_allclose([c[0] for c in told[:-1]], [c[0] for c in job.log], rtol=1e-9)


@st.composite
def policy_options(draw: st.DrawFn) -> dict[str, object]:
    return {
        "sticky": draw(st.booleans()),
        "reserve_after_s": draw(st.sampled_from([math.inf, math.inf, 900.0, 5000.0])),
        "queue_limits_gpu_s": draw(st.sampled_from([(600.0, 3000.0), (3600.0, 36000.0)])),
    }


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("allotment", ALLOTMENTS)
@pytest.mark.parametrize("ordering", ORDERINGS)
@FUZZ
@given(data=st.data())
def test_every_combination(ordering: str, allotment: str, placement: str, data: st.DataObject) -> None:
    cluster = data.draw(clusters())
    trace = data.draw(traces(cluster))
    policy = JobPolicy(ordering, allotment, placement, **data.draw(policy_options()))  # type: ignore[arg-type]
    check(trace, cluster, policy, data.draw(options()))


@pytest.mark.slow
def test_crowded_clusters() -> None:
    """Many jobs at once, up to 70 nodes, all options: a run for each of some combinations."""
    combinations = list(itertools.product(ORDERINGS, ALLOTMENTS, PLACEMENTS))
    for seed in range(11):
        r = random.Random(seed)
        cluster, trace = crowded_case(seed)
        policy = JobPolicy(
            # 13 has no common factor with the number of any kind of policy, so that all combinations occur
            *combinations[13 * seed],
            sticky=r.random() < 0.5,
            reserve_after_s=r.choice([math.inf, 900.0]),
        )
        chosen = EngineOptions(
            lease_s=r.choice([300.0, 60.0]),
            finish=r.choice(["exact", "lease-end"]),
            speeds=r.choice(["matrix", "two-speed"]),
            restart_cost_s=r.choice([0.0, 30.0]),
            record_placements=r.random() < 0.7,
        )
        check(trace, cluster, policy, chosen)


@pytest.mark.parametrize("record_placements", [True, False])
def test_a_move_that_changes_the_level_too_costs_a_restart(record_placements: bool) -> None:
    """Worked out by hand: `late` (priority) takes the only node with 2 GPUs at 300 s; `early` moves to the other
    two nodes and is cut at once, since their CPU is less: it owes 100 s whatever the record holds."""
    cluster = Cluster(
        (
            NodeGroup(1, 2, CATALOG["A100-40GB"], 24, 500 * 10**9),
            NodeGroup(2, 1, CATALOG["A100-40GB"], 3, 62_500_000_000),
        )
    )
    jobs = Jobs.build(
        2, id=["early", "late"], arrival_s=[0.0, 250.0], gpus=[2, 2], iterations=[1000, 1000],
        model=["res18", "gnmt"], priority=[0, 1], cpus=[18, 24],
    )  # fmt: skip
    chosen = EngineOptions(restart_cost_s=100.0, record_placements=record_placements)
    record, _ = run_training(Trace(jobs, "hand"), cluster, PROFILES, JobPolicy("fifo", "tune"), chosen)
    at_nine_cores, at_three_cores = 0.64 / 2.4, 0.64 / 1.0  # seconds per iteration of res18
    first_lease = 300 / at_nine_cores
    assert first_lease > 1000  # the job ends in its first lease, so the run below has a longer one
    assert finish_times(record)[0] == pytest.approx(1000 * at_nine_cores)
    jobs.iterations[0] = 2000
    record, _ = run_training(Trace(jobs, "hand"), cluster, PROFILES, JobPolicy("fifo", "tune"), chosen)
    left = 2000 - first_lease
    by_then = 300 + 100 + left * at_three_cores
    assert by_then > 600  # at 600 s `late` has ended (1000 x 0.12 s), and `early` moves back and pays a restart again
    left -= 200 / at_three_cores
    assert finish_times(record)[0] == pytest.approx(600 + 100 + left * at_nine_cores)


def test_a_restart_longer_than_a_lease_takes_from_several() -> None:
    """Worked out by hand: stopped at 300 s by a job of one lease, resumed at 600 s owing 700 s, which is two leases and
    100 s of a third."""
    cluster = Cluster((NodeGroup(1, 1, CATALOG["A100-40GB"], 3, 62_500_000_000),))
    jobs = Jobs.build(
        2, id=["a", "b"], arrival_s=[0.0, 100.0], gpus=[1, 1], duration_s=[500, 300], model=["gnmt", "gnmt"],
        priority=[0, 1],
    )  # fmt: skip
    trace, policy, chosen = Trace(jobs, "hand"), JobPolicy("fifo", "tune"), EngineOptions(restart_cost_s=700.0)
    record, _ = run_training(trace, cluster, PROFILES, policy, chosen)
    assert finish_times(record) == pytest.approx([600 + 700 + 200, 600])
    check(trace, cluster, policy, chosen)
