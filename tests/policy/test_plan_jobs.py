"""The policy on plain data decides what the simulator decided at the same moment."""

from __future__ import annotations

import numpy as np
import pytest

from cotenant.core.events import Kind, Reason
from cotenant.core.plan import Snapshot
from cotenant.core.work import Jobs, Trace
from cotenant.policy.jobs.choice import JobPolicy
from cotenant.policy.jobs.plan import plan_jobs
from cotenant.profiles.training.tables import load_profiles
from cotenant.sim.jobs.engine import EngineOptions, run_training
from cotenant.workloads.clusters.forms import parse_cluster
from cotenant.workloads.jobs.generate import Workload, generate

PROFILES = load_profiles()
CLUSTER = parse_cluster("4x8")
LEASE_S = 300.0


@pytest.fixture(scope="module")
def trace() -> Trace:
    drawn = generate(
        Workload(jobs=150, load=2.0, cluster_gpus=32, durations="two-part-short", seed=4),
        PROFILES.classes, PROFILES.iteration_s,
    )  # fmt: skip
    return drawn.trace


@pytest.mark.parametrize(
    ("ordering", "allotment"),
    [("fifo", "proportional"), ("fifo", "greedy"), ("las", "tune"), ("drf", "tune"), ("sjf", "greedy")],
)
def test_plans_agree_with_the_simulator(trace: Trace, ordering: str, allotment: str) -> None:
    policy = JobPolicy(ordering, allotment)
    record, _ = run_training(trace, CLUSTER, PROFILES, policy, EngineOptions(finish="lease-end"))
    events, where = record.events, record.placements
    assert where is not None
    compared = 0
    last = int(events.time_s[-1] / LEASE_S)
    for tick in range(20, last, last // 12):
        now = tick * LEASE_S
        attained, running, done = np.zeros(150), {}, np.zeros(150, bool)
        started: dict[int, float] = {}
        for i in np.flatnonzero(events.time_s <= now):
            job, kind = int(events.job[i]), Kind(int(events.kind[i]))
            if kind in (Kind.START, Kind.RESUME):
                started[job] = float(events.time_s[i])
            if kind in (Kind.FINISH, Kind.PREEMPT):
                attained[job] += events.time_s[i] - started.pop(job)
                running.pop(job, None)
                done[job] |= kind is Kind.FINISH
            elif kind in (Kind.START, Kind.RESUME, Kind.MOVE, Kind.RESIZE):
                nodes = where.nodes[where.offset[i] : where.offset[i + 1]]
                running[job] = (tuple(nodes.tolist()), int(events.cpu_milli[i]))
        for job, since in started.items():
            attained[job] += now - since
        rows = np.flatnonzero((trace.jobs.arrival_s <= now) & ~done)
        if not len(rows):
            continue
        snapshot = Snapshot(
            CLUSTER, trace.jobs.take(rows), np.zeros(len(rows)), attained[rows], trace.jobs.arrival_s[rows]
        )
        plan = plan_jobs(snapshot, now, policy, PROFILES)
        got = {int(g.job): (g.nodes, round(sum(g.node_cpus) * 1000)) for g in plan.grants}
        assert got == running, f"at {now} s"
        assert set(plan.waiting) == {str(row) for row in rows if row not in running}
        compared += 1
    assert compared > 8


def _jobs(n: int, gpus: float = 8, model: str = "res18") -> Jobs:
    return Jobs.build(
        n, id=[f"j{i}" for i in range(n)], arrival_s=np.arange(n), gpus=[gpus] * n, model=[model] * n,
        duration_s=[3600.0] * n,
    )  # fmt: skip


def _snapshot(jobs: Jobs, **more: object) -> Snapshot:
    n = len(jobs)
    return Snapshot(CLUSTER, jobs, np.zeros(n), np.zeros(n), jobs.arrival_s, **more)  # type: ignore[arg-type]


def test_who_waits_is_told_why() -> None:
    plan = plan_jobs(_snapshot(_jobs(5)), 10.0, JobPolicy("fifo", "proportional"), PROFILES)
    assert [g.job for g in plan.grants] == ["j0", "j1", "j2", "j3"]
    assert plan.waiting == {"j4": Reason.GPUS_FULL}


def test_sticky_jobs_keep_their_gpus_and_the_outranked_are_preempted() -> None:
    jobs = _jobs(5)
    policy = JobPolicy("srtf", "proportional", sticky=True)
    first = plan_jobs(_snapshot(jobs), 10.0, policy, PROFILES)
    jobs.duration_s[4] = 60.0  # the new job is now the shortest
    second = plan_jobs(_snapshot(jobs, running=first.grants), 20.0, policy, PROFILES)
    assert second.preempt == ("j3",)
    kept = {g.job: g.nodes for g in first.grants if g.job != "j3"}
    now = {g.job: g.nodes for g in second.grants}
    assert {name: now[name] for name in kept} == kept
    assert now["j4"] == (3,)  # where j3 was before


def test_a_job_that_runs_by_a_reservation_keeps_its_gpus() -> None:
    jobs = _jobs(5)
    policy = JobPolicy("srtf", "proportional", reserve_after_s=3600.0)
    jobs.duration_s[0] = 36000.0  # the last one by the policy's order
    starving = plan_jobs(_snapshot(jobs), 3600.5, policy, PROFILES)
    assert [(g.job, g.nodes, g.reserved) for g in starving.grants if g.reserved] == [("j0", (0,), True)]
    later = Snapshot(CLUSTER, jobs, np.zeros(5), np.zeros(5), np.full(5, 3900.5), running=starving.grants)
    plan = plan_jobs(later, 3900.5, policy, PROFILES)
    assert ("j0", (0,), True) in [(g.job, g.nodes, g.reserved) for g in plan.grants]


def test_parts_of_gpus_are_adopted_again() -> None:
    jobs = _jobs(6, gpus=0.5, model="gnmt")
    policy = JobPolicy("fifo", "tune", sticky=True)
    first = plan_jobs(_snapshot(jobs), 10.0, policy, PROFILES)
    again = plan_jobs(_snapshot(jobs, running=first.grants), 310.0, policy, PROFILES)
    assert again.grants == first.grants
    assert all(g.node_gpus == (0.5,) for g in again.grants)


def test_optimal_gives_what_is_left_to_whom_it_helps_most() -> None:
    jobs = _jobs(8, gpus=4, model="res18")
    jobs.model[4:] = "gnmt"
    plan = plan_jobs(_snapshot(jobs), 10.0, JobPolicy("fifo", "optimal"), PROFILES)
    assert len(plan.grants) == 8
    speed = {g.job: g.speed for g in plan.grants}
    # the four jobs that need much CPU share what the four others leave
    assert all(speed[f"j{i}"] > 1.3 for i in range(4))
    assert all(speed[f"j{i}"] == pytest.approx(1.0) for i in range(4, 8))
