"""Invariants of the partition engine on random jobs, and small cases worked out by hand."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cotenant.core.events import Kind
from cotenant.core.mig import geometry, parse_layout
from cotenant.policy.mig.decide import POLICIES, PartitionRules
from cotenant.profiles.mig.speeds import mps_speed, transfer_speeds
from cotenant.sim.mig.enforce import PartitionInput
from cotenant.sim.mig.engine import PartitionEngine

A100 = geometry("A100-40GB")
SPEED = [1.0, 0.7, 0.6, 0.4, 0.2]
HOLDS = (Kind.START, Kind.RESUME, Kind.MOVE, Kind.RESIZE, Kind.PROFILE)


def build(
    jobs: list[tuple[float, float, int]],
    speeds: list[list[float]] | None = None,
    *,
    gpus: int = 2,
    per_node: int = 2,
    launch: float = 5.0,
    floors: list[float] | None = None,
) -> PartitionInput:
    """jobs: (arrival, work on a whole GPU, GPUs)."""
    jobs = sorted(jobs)
    n = len(jobs)
    return PartitionInput(
        A100,
        [g // per_node for g in range(gpus)],
        np.array([j[0] for j in jobs]),
        np.array([j[2] for j in jobs], float),
        np.array([j[1] for j in jobs]),
        np.full(n, launch),
        np.array(speeds or [SPEED] * n),
        np.array(floors or [0.0] * n),
    )


def rules(policy: str, **more: object) -> PartitionRules:
    layout = parse_layout(A100, "3,2,2") if policy == "static" else None
    return PartitionRules(policy, layout=layout, **more)  # type: ignore[arg-type]


def finish(data: PartitionInput, chosen: PartitionRules) -> list[float]:
    engine = PartitionEngine(data, chosen)
    engine.run()
    return engine.work.finish


# ---- cases computed by hand


def test_a_job_alone_pays_one_launch() -> None:
    for policy in ("whole", "miso", "miso-perfect", "oracle"):
        assert finish(build([(10, 100, 1)]), rules(policy)) == [115.0], policy
    # the job gets the 3g of the layout 3,2,2
    assert finish(build([(10, 60, 1)]), rules("static")) == [10 + 5 + 60 / 0.6]
    # under MPS at 33 % the speed lies between 2g (0.4 at 2/7) and 3g (0.6 at 3/7)
    share = A100_share(1 / 3)
    assert finish(build([(10, 60, 1)]), rules("mps")) == [pytest.approx(10 + 5 + 60 / share)]


def A100_share(share: float) -> float:  # noqa: N802 - worked out here, apart from the package
    return 0.4 + (share - 28 / 98) / (42 / 98 - 28 / 98) * (0.6 - 0.4)


def test_oracle_shares_one_gpu_between_two_jobs() -> None:
    """At t=0 a takes the GPU. At t=100 b comes: 4g + 3g. a stops 4 s + 5 s; b, as long, gets the other slice.

    Both are alike, so whoever sits where, one runs at 0.7 and one at 0.6 from 109 on. a has done 95 by then.
    """
    ends = finish(build([(0, 1000, 1), (100, 70, 1)], gpus=1), rules("oracle", horizon_s=1e9))
    b_on_4g, b_on_3g = 109 + 70 / 0.7, 109 + 70 / 0.6
    assert ends[1] in (pytest.approx(b_on_4g), pytest.approx(b_on_3g))
    speed_a = 0.6 if ends[1] == pytest.approx(b_on_4g) else 0.7
    left = 1000 - 95 - speed_a * (ends[1] - 109)
    assert ends[0] == pytest.approx(ends[1] + 9 + left / 1.0)  # back to the whole GPU, which takes 4 s + 5 s


def test_a_move_that_does_not_pay_is_not_made() -> None:
    """b ends; a would gain 0.3 of its speed over a horizon of 20 s, and lose 9 s of it: it stays on its slice."""
    ends = finish(build([(0, 1000, 1), (100, 70, 1)], gpus=1), rules("oracle", horizon_s=20.0))
    speed_a = 0.6 if ends[1] == pytest.approx(109 + 100) else 0.7
    assert ends[0] == pytest.approx(109 + (1000 - 95) / speed_a)


def test_costs_of_measuring_by_hand() -> None:
    """miso with every newcomer measured: 4 s MPS on, 5 s launch, 30 s at MPS speed, 4 s reconfigure, 5 s launch."""
    ends = finish(build([(0, 1000, 1), (100, 70, 1)], gpus=1), rules("miso-perfect", profile_after_s=0.0))
    mps = float(mps_speed(np.array([SPEED]), A100, 2, 0.5)[0])
    # Half of the GPU is 49 of 98 SMs, which lies between 3g (42 SMs) and 4g (56 SMs). The result is divided by 1.15.
    assert mps == pytest.approx((0.6 + (49 - 42) / 14 * 0.1) / 1.15)
    start = 100 + 4 + 5 + 30 + 4 + 5
    assert ends[1] in (pytest.approx(start + (70 - 30 * mps) / 0.7), pytest.approx(start + (70 - 30 * mps) / 0.6))


def test_measuring_a_job_alone_by_hand() -> None:
    """MPS on 14, launched 19, measured for 30 s on half the GPU (0.65), reconfigured 53, launched again 58."""
    data = build([(10, 100, 1)], gpus=1)
    assert finish(data, rules("miso-perfect", profile_sole=True)) == [pytest.approx(58 + 100 - 30 * 0.65)]


def test_no_overheads_makes_everything_free() -> None:
    for policy in ("whole", "oracle", "miso-perfect"):
        assert finish(build([(10, 100, 1)]), rules(policy, overheads=False)) == [110.0]


def test_a_floor_makes_a_job_wait() -> None:
    """Both want 0.65: only 4g and 7g give that, so the second waits for the first under every policy that shares."""
    data = build([(0, 100, 1), (1, 100, 1)], gpus=1, floors=[0.65, 0.65])
    assert finish(data, rules("oracle")) == [105.0, 105.0 + 105.0]


def test_a_floor_found_out_by_measuring_sends_the_newcomer_back_to_the_queue() -> None:
    data = build([(0, 100, 1), (1, 100, 1)], gpus=1, floors=[0.65, 0.65])
    engine = PartitionEngine(data, rules("miso-perfect"))
    log = engine.run()
    assert [e.job for e in log if e.kind is Kind.PREEMPT] == [1]
    back = [e for e in log if e.kind is Kind.RESUME]
    assert [(e.job, e.time_s, e.speed) for e in back] == [(1, engine.work.finish[0], 1.0)]


def test_min_slice_keeps_a_job_off_small_slices() -> None:
    big = [1.0, 0.6, 0.5, 0.0, 0.0]
    data = build([(0, 500, 1), (1, 500, 1), (2, 500, 1)], [big, big, big], gpus=1)
    engine = PartitionEngine(data, rules("oracle"))
    engine.run()
    # three jobs that need at least 3g never fit on one GPU, so the third starts when another one ends
    assert engine.work.start[2] == pytest.approx(min(engine.work.finish[:2]))


def test_a_gang_takes_whole_gpus_of_one_node_beside_shared_ones() -> None:
    data = build([(0, 100, 1), (1, 100, 2), (2, 50, 1)], gpus=4, per_node=2)
    engine = PartitionEngine(data, rules("oracle"))
    log = engine.run()
    gang = next(e for e in log if e.job == 1 and e.kind is Kind.START)
    assert gang.gpus == (2, 3)
    assert gang.share == 2.0
    assert engine.work.finish[1] == 1 + 5 + 100


@pytest.mark.parametrize("policy", ["whole", "static", "mps", "oracle", "miso-perfect"])
def test_a_waiting_gang_is_not_starved_by_single_jobs(policy: str) -> None:
    singles = [(float(t), 100.0, 1) for t in range(0, 400, 10)]
    data = build([*singles, (35.0, 100.0, 2)], gpus=2, per_node=2)
    engine = PartitionEngine(data, rules(policy))
    engine.run()
    gang = int(np.flatnonzero(data.gpus == 2)[0])
    before = sum(1 for j in range(len(singles) + 1) if engine.work.start[j] < engine.work.start[gang])
    assert engine.work.start[gang] < 1200
    assert before <= 8


def test_static_promotes_to_a_larger_free_slice_when_nobody_waits() -> None:
    """a on 3g (50 work), b on 2g (400 work): when a ends at 5 + 50/0.6, b moves up to the 3g and pays a launch."""
    ends = finish(build([(0, 50, 1), (0, 400, 1)], gpus=1), rules("static"))
    moved = 5 + 50 / 0.6
    assert ends[0] == pytest.approx(moved)
    assert ends[1] == pytest.approx(moved + 5 + (400 - 0.4 * (moved - 5)) / 0.6)


SLOW = [1.0, 0.15, 0.15, 0.15, 0.15]


def put_back_before_a_gang() -> PartitionInput:
    """a (floor 0.5) and c cannot share, which measuring finds out after gang d has claimed both GPUs; b is brief."""
    return build([(0, 5, 1), (1, 1, 1), (1, 4, 1), (2, 1, 2)], [SLOW] * 4, floors=[0.5, 0.0, 0.0, 0.0], launch=0.0)


@pytest.mark.parametrize("policy", ["miso", "miso-perfect"])
def test_a_job_put_back_before_a_gang_is_not_shut_out_by_its_claim(policy: str) -> None:
    """MPS on at 5, measured until 35; then c has b's GPU, idle since 2, and a the other after 4 s; d when a is done."""
    data = put_back_before_a_gang()
    assert list(data.work_s) == [5, 1, 4, 1]
    mps = 0.15 / 1.15  # half of the GPU lies between 3g and 4g, which are equally fast here; two jobs share it
    end_c = 35 + 4 - 30 * mps
    end_a = 35 + 4 + (5 - 1) - 30 * mps
    assert finish(data, rules(policy)) == pytest.approx([end_a, 2.0, end_c, end_a + 1])


def test_an_estimate_below_the_floor_everywhere_leaves_the_whole_gpu() -> None:
    data = build([(0, 100, 1), (1, 100, 1)], gpus=1, floors=[1.0, 0.9], launch=0.0)
    data.predict = lambda job, together: np.array([0.8, 0.5, 0.4, 0.3, 0.2])
    ends = finish(data, rules("miso", profile_sole=True, reconfigure_s=0.0))
    # a is measured alone on half of the GPU for 30 s (speed 0.65) and then has all of it; the same for b
    assert ends == pytest.approx([130 - 30 * 0.65, 2 * (130 - 30 * 0.65)])


@pytest.mark.parametrize(("jobs", "most"), [(1, 1), (30, 30), (2500, 1250)])
def test_progress_rises_to_the_number_of_jobs_in_about_a_thousand_steps(jobs: int, most: int) -> None:
    told: list[tuple[int, int]] = []
    data = build([(float(10 * j), 1.0, 1) for j in range(jobs)])
    PartitionEngine(data, rules("whole")).run(lambda done, of: told.append((done, of)))
    assert told == sorted(set(told))
    assert told[-1] == (jobs, jobs)
    assert {of for _, of in told} == {jobs}
    assert len(told) == most


def test_slices_of_a_static_layout_exist_again_4_s_after_a_gang() -> None:
    """The gang: 4 s to the whole GPUs, 5 s launch, 100 s. Then 4 s back to 3,2,2, 5 s launch, on the 3g."""
    data = build([(0, 100, 2), (1, 60, 1)])
    assert finish(data, rules("static")) == [109.0, pytest.approx(109 + 4 + 5 + 60 / 0.6)]


# ---- invariants


@st.composite
def workloads(draw: st.DrawFn) -> PartitionInput:
    n = draw(st.integers(1, 14))
    gpus = draw(st.sampled_from([2, 4]))
    jobs, speeds, floors = [], [], []
    for _ in range(n):
        gang = draw(st.sampled_from([1, 1, 1, 1, 2]))
        jobs.append((float(draw(st.integers(0, 300))), float(draw(st.integers(1, 500))), gang))
        row = [1.0] + [draw(st.sampled_from([0.15, 0.3, 0.5, 0.7, 0.9, 1.02])) for _ in range(4)]
        for k in range(4, 4 - draw(st.integers(0, 2)), -1):
            row[k] = 0.0
        speeds.append(row)
        floors.append(draw(st.sampled_from([0.0, 0.0, 0.0, 0.5])))
    return build(jobs, speeds, gpus=gpus, floors=floors, launch=float(draw(st.integers(0, 9))))


@settings(max_examples=50, deadline=None)
@example(put_back_before_a_gang(), "miso", True, "moved", True)
@given(workloads(), st.sampled_from(list(POLICIES)), st.booleans(), st.sampled_from(["moved", "all"]), st.booleans())
def test_invariants(data: PartitionInput, policy: str, overheads: bool, disturb: str, greedy: bool) -> None:
    if policy == "static":
        data.speeds[:, 1:] = np.where(data.speeds[:, 1:] == 0, 0.55, data.speeds[:, 1:])
        data.speeds = np.maximum(data.speeds, 0.5)  # a static layout has no place for a job that fits nowhere
    chosen = rules(
        policy,
        overheads=overheads,
        disturb=disturb,
        profile_after_s=0.0 if greedy else 60.0,
        placement="best-fit" if greedy else "least-loaded",
        objective="slowdown" if greedy else "throughput",
    )
    engine = PartitionEngine(data, chosen)
    log = engine.run()
    n = len(data.arrival_s)
    assert not np.isnan(engine.work.finish).any(), "a job was lost"
    assert [e.job for e in log if e.kind is Kind.FINISH] != []
    assert sorted(e.job for e in log if e.kind is Kind.FINISH) == list(range(n))
    soonest = data.arrival_s + data.work_s / 1.02
    assert (np.array(engine.work.finish) >= soonest - 1e-6).all()
    assert max(engine.work.left) == 0
    times = [e.time_s for e in log]
    assert times == sorted(times)
    _never_oversubscribed(engine, log)
    if policy in ("oracle", "static", "whole", "mps"):
        for e in log:
            if e.kind in HOLDS:
                assert e.speed >= data.qos_floor[e.job] - 1e-12
    again = PartitionEngine(data, chosen)
    again.run()
    assert again.work.finish == engine.work.finish


@st.composite
def hard_workloads(draw: st.DrawFn) -> PartitionInput:
    """Much waiting: high floors, jobs of up to every GPU, jobs that fit few slices, estimates that are far off."""
    gpus, per_node = draw(st.sampled_from([(1, 1), (2, 2), (3, 3), (4, 2), (4, 1)]))
    n = draw(st.integers(1, 12))
    late, brief = draw(st.sampled_from([5, 60, 300])), draw(st.sampled_from([5, 60, 500]))
    slow = draw(st.booleans())  # only the whole GPU meets a job's minimum speed, which only a measurement finds out
    jobs, speeds, floors = [], [], []
    for _ in range(n):
        gang = draw(st.sampled_from([1, 1, 1, 1, 2, gpus]))
        jobs.append((float(draw(st.integers(0, late))), float(draw(st.integers(1, brief))), min(gang, gpus)))
        row = [1.0] + [draw(st.sampled_from([0.0, 0.15, 0.5, 0.9, 1.02])) for _ in range(4)]
        speeds.append(SLOW if slow else row)
        floors.append(draw(st.sampled_from([0.0, 0.0, 0.3, 0.5, 1.0])))
    launch = draw(st.sampled_from([0.0, 5.0, 700.0]))
    data = build(jobs, speeds, gpus=gpus, per_node=per_node, floors=floors, launch=launch)
    if draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        data.predict = lambda job, together: data.speeds[job] * rng.uniform(0.5, 1.5, len(A100.kinds))
    return data


OPTIONS = st.fixed_dictionaries(
    {
        "placement": st.sampled_from(["best-fit", "least-loaded"]),
        "objective": st.sampled_from(["slowdown", "throughput"]),
        "disturb": st.sampled_from(["moved", "all"]),
        "overheads": st.booleans(),
        "profile_sole": st.booleans(),
        "horizon_s": st.sampled_from([0.001, 20.0, 300.0, 1e9]),
        "profile_after_s": st.sampled_from([0.0, 60.0, 1e9]),
        "profile_s": st.sampled_from([0.0, 30.0]),
        "reconfigure_s": st.sampled_from([0.0, 4.0]),
        "checkpoint_s": st.sampled_from([0.0, 50.0]),
        "mps_jobs": st.sampled_from([1, 2, 3, 7]),
    }
)
LAYOUTS = ["7", "4,3", "3,2,2", "1,1,1,1,1,1,1"]


@settings(max_examples=int(os.environ.get("COTENANT_PARTITION_EXAMPLES", "150")), deadline=None)
@example(put_back_before_a_gang(), "miso", {}, "7")
@given(hard_workloads(), st.sampled_from([*POLICIES, "miso"]), OPTIONS, st.sampled_from(LAYOUTS))
def test_a_job_that_could_run_alone_always_finishes(
    data: PartitionInput, policy: str, options: dict[str, object], layout: str
) -> None:
    """Whatever else waits: a single job needs one GPU (static: one slice that it may have), a gang its GPUs."""
    static = parse_layout(A100, layout) if policy == "static" else None
    offered = sorted({A100.kinds.index(p.kind) for p in static}) if static else [0]
    usable = data.speeds[:, offered]
    could = (data.gpus > 1) | ((usable > 0) & (usable >= data.qos_floor[:, None])).any(axis=1)
    engine = PartitionEngine(data, PartitionRules(policy, layout=static, **options))  # type: ignore[arg-type]
    log = engine.run()
    assert not (np.isnan(engine.work.finish) & could).any(), "a job waits for ever"
    assert not (~np.isnan(engine.work.finish) & ~could).any()
    _never_oversubscribed(engine, log)


def _never_oversubscribed(engine: PartitionEngine, log: list) -> None:
    """After every moment the shares on each GPU sum to at most one, and a gang shares with nobody."""
    held: dict[int, tuple[tuple[int, ...], float]] = {}
    for i, e in enumerate(log):
        if e.kind in HOLDS:
            held[e.job] = (e.gpus, e.share)
        elif e.kind in (Kind.FINISH, Kind.PREEMPT):
            held.pop(e.job, None)
        if i + 1 < len(log) and log[i + 1].time_s == e.time_s:
            continue
        for g in range(len(engine.gpus)):
            on = [share / len(gpus) for gpus, share in held.values() if g in gpus]
            assert sum(on) <= 1 + 1e-9, (e.time_s, g, on)
            if any(g in gpus and len(gpus) > 1 for gpus, _ in held.values()):
                assert len(on) == 1


# ---- models of speed


def test_transfer_is_exact_on_equal_shares_and_keeps_memory_limits() -> None:
    big = np.array([SPEED, [1.0, 0.6, 0.5, 0.0, 0.0]])
    same = transfer_speeds(big, A100, geometry("A100-80GB", double_memory=False))
    # Equal shares of SMs give the speeds that were known. With twice the memory, the second job fits into 2g.20gb.
    assert list(same[0]) == SPEED
    assert list(same[1][:3]) == [1.0, 0.6, 0.5]
    assert same[1][3] == pytest.approx(0.5 * 2 / 3)
    assert same[1][4] == 0.0
    h100 = transfer_speeds(big, A100, geometry("H100-80GB"))
    three = 60 / 132  # lies between 3g (42/98) and 4g (56/98) of the A100
    assert h100[0][2] == pytest.approx(0.6 + (three - 42 / 98) / (14 / 98) * 0.1)
    assert h100[0][4] > h100[0][5]  # the double-memory 1g has 26 SMs, the 1g 16


def test_mps_speed_never_exceeds_the_share_that_is_left() -> None:
    rows = np.array([SPEED])
    assert mps_speed(rows, A100, 1, 1.0)[0] == 1.0
    assert mps_speed(rows, A100, 7, 1.0)[0] == pytest.approx(0.2 / (1 + 0.15 * 6))
    assert mps_speed(np.array([[1.0, 0.6, 0.5, 0.0, 0.0]]), A100, 4, 0.5)[0] > 0  # MPS does not split the memory
