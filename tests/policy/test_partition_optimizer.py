"""The MIG optimizer against trying everything."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cotenant.core.errors import InputError
from cotenant.core.mig import Geometry, Placement, geometry, maximal_layouts, maximal_multisets
from cotenant.policy.mig.optimizer import PartitionJob, best_partition, plan_jobs, speed_row

A100, H100, A30 = geometry("A100-40GB"), geometry("H100-80GB"), geometry("A30")


def brute(geo: Geometry, speeds: np.ndarray, objective: str) -> float:
    """Best sum of speeds, or least sum of 1/speed, over all multisets and all ways to hand them out."""
    best = np.inf
    with np.errstate(divide="ignore"):
        cost = np.where(speeds > 0, -speeds if objective == "throughput" else 1 / speeds, np.inf)
    for kinds in maximal_multisets(geo):
        if len(kinds) < len(speeds):
            continue
        index = [geo.kinds.index(k) for k in kinds]
        for way in set(itertools.permutations(index, len(speeds))):
            best = min(best, sum(cost[j, k] for j, k in enumerate(way)))
    return best


def speed_tables(geo: Geometry, most: int) -> st.SearchStrategy[np.ndarray]:
    cell = st.one_of(st.just(0.0), st.floats(0.01, 1.2))
    row = st.lists(cell, min_size=len(geo.kinds), max_size=len(geo.kinds))
    return st.lists(row, min_size=1, max_size=most).map(np.array)


@pytest.mark.parametrize("objective", ["throughput", "slowdown"])
@pytest.mark.parametrize(("geo", "most"), [(A100, 5), (H100, 4), (A30, 5)], ids=["a100", "h100", "a30"])
def test_same_optimum_as_brute_force(geo: Geometry, most: int, objective: str) -> None:
    @settings(max_examples=60, deadline=None)
    @given(speed_tables(geo, most))
    def check(speeds: np.ndarray) -> None:
        plan, best = best_partition(geo, speeds, objective), brute(geo, speeds, objective)
        if plan is None:
            assert best == np.inf
            return
        total = -plan.objective if objective == "throughput" else plan.objective * len(speeds)
        # preferring small slices changes the objective by at most 1e-9 per memory slot
        assert total == pytest.approx(best, abs=2e-8, rel=1e-7)
        assert geo.fits(plan.placements)
        assert all(speeds[j, geo.kinds.index(p.kind)] > 0 for j, p in enumerate(plan.placements))

    check()


@pytest.mark.parametrize("jobs", [6, 7])
def test_same_optimum_with_six_and_seven_jobs(jobs: int) -> None:
    rng = np.random.default_rng(jobs)
    for _ in range(12):
        speeds = rng.random((jobs, len(A100.kinds))) + 0.01
        for objective in ("throughput", "slowdown"):
            plan = best_partition(A100, speeds, objective)
            assert plan is not None
            total = -plan.objective if objective == "throughput" else plan.objective * jobs
            assert total == pytest.approx(brute(A100, speeds, objective), abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(speed_tables(A100, 4), st.sampled_from(maximal_layouts(A100)), st.data())
def test_migration_cost_against_every_placement(
    speeds: np.ndarray, layout: tuple[Placement, ...], data: st.DataObject
) -> None:
    """Exact also where a job that moves pays: every set of placements is tried."""
    speeds = np.maximum(speeds, 0.05)
    current = [None] * len(speeds)
    for j in range(min(len(speeds), len(layout))):
        current[j] = data.draw(st.sampled_from([None, layout[j]]))
    downtime = np.array([data.draw(st.sampled_from([0.0, 10.0, 60.0])) for _ in speeds])
    plan = best_partition(A100, speeds, "throughput", current, downtime, 300.0)
    best = -np.inf
    for places in itertools.permutations(A100.placements(), len(speeds)):
        if not A100.fits(places):
            continue
        value = 0.0
        for j, p in enumerate(places):
            stop = downtime[j] / 300.0 if current[j] not in (None, p) else 0.0
            value += speeds[j, A100.kinds.index(p.kind)] * (1 - stop)
        best = max(best, value)
    if plan is None:
        assert best == -np.inf
    else:
        assert -plan.cost == pytest.approx(best, abs=1e-6)


def test_does_not_move_jobs_for_nothing() -> None:
    speeds = np.array([[1, 0.8, 0.79, 0.5, 0.3], [1, 0.8, 0.79, 0.5, 0.3]])
    current = [Placement(4, "3g"), Placement(0, "3g")]
    free = best_partition(A100, speeds, "throughput", current)
    paid = best_partition(A100, speeds, "throughput", current, 10.0, 300.0)
    assert free is not None
    assert paid is not None
    # 0.01 better than the current layout, but at the cost of a move
    assert [p.kind for p in free.placements] in (["4g", "3g"], ["3g", "4g"])
    assert list(paid.placements) == current
    assert paid.moved == ()


def test_idle_slices_are_allowed_and_ties_take_the_smaller_slice() -> None:
    flat = np.array([[1.0, 1.0, 1.0, 1.0, 1.0]])
    plan = best_partition(A100, flat, "throughput")
    assert plan is not None
    assert plan.placements[0].kind == "1g"


def test_limits_of_jobs() -> None:
    speed = {"7g": 1.0, "4g": 0.7, "3g": 0.71, "2g": 0.4, "1g": 0.2}
    assert list(speed_row(A100, PartitionJob("a", speed))) == [1.0, 0.7, 0.71, 0.4, 0.2]
    assert list(speed_row(A100, PartitionJob("a", speed, min_slice="2g"))) == [1.0, 0.7, 0.71, 0.4, 0.0]
    assert list(speed_row(A100, PartitionJob("a", speed, qos_floor=0.5))) == [1.0, 0.7, 0.71, 0.0, 0.0]
    assert list(speed_row(A100, PartitionJob("a", speed, memory_bytes=15 * 2**30))) == [1.0, 0.7, 0.71, 0.0, 0.0]
    holes = PartitionJob("a", {"7g": 1.0, "2g": 0.4})  # 3g and 4g were not measured, and 1g has too little memory
    assert list(speed_row(A100, holes)) == [1.0, 0.0, 0.0, 0.4, 0.0]
    # A 1g with double memory counts as fast as a 1g if only the latter is known. Profile names of another GPU model are
    # ignored.
    assert list(speed_row(H100, PartitionJob("a", speed | {"1g.5gb": 9.0}))) == [1.0, 0.7, 0.71, 0.4, 0.2, 0.2]


@example([1.0, 0.9])
@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0.5, 1.0), min_size=2, max_size=4))
def test_floors_are_honoured_or_there_is_no_plan(floors: list[float]) -> None:
    speed = {"7g": 1.0, "4g": 0.7, "3g": 0.6, "2g": 0.4, "1g": 0.2}
    jobs = [PartitionJob(f"j{i}", speed, qos_floor=f) for i, f in enumerate(floors)]
    rows = np.array([speed_row(A100, j) for j in jobs])
    plan = best_partition(A100, rows)
    fits = (
        len(floors) == 2 and sorted(floors)[0] <= 0.6 and sorted(floors)[1] <= 0.7  # one job on 3g and the other on 4g
    )
    assert (plan is not None) == fits
    if plan is not None:
        assert all(speed[p.kind] >= f for p, f in zip(plan.placements, floors, strict=True))


def test_refusals_in_one_sentence() -> None:
    speed = {"7g": 1.0}
    with pytest.raises(InputError, match="no layout of A100-40GB holds these 2 jobs"):
        plan_jobs(A100, [PartitionJob("a", speed), PartitionJob("b", speed)], "throughput")
    with pytest.raises(InputError, match="'a' fits no slice of A100-40GB"):
        plan_jobs(A100, [PartitionJob("a", {"7g": 0.0})], "throughput")
    with pytest.raises(InputError, match="fits no slice"):
        plan_jobs(A100, [PartitionJob("a", speed, memory_bytes=2**40)], "throughput")
    with pytest.raises(InputError, match="two jobs are named 'a'"):
        plan_jobs(A100, [PartitionJob("a", speed), PartitionJob("a", speed)], "throughput")
    with pytest.raises(InputError, match="speed nan on 7g"):
        plan_jobs(A100, [PartitionJob("a", {"7g": float("nan")})], "throughput")
    with pytest.raises(InputError, match="no jobs"):
        plan_jobs(A100, [], "throughput")
    eight = [PartitionJob(f"j{i}", {"7g": 1.0, "1g": 0.3}) for i in range(8)]
    with pytest.raises(InputError, match="these 8 jobs"):
        plan_jobs(A100, eight, "throughput")


def test_four_plus_three_beats_what_the_public_controller_could_do(shared: Path) -> None:
    """Two measured workloads: 4g+3g against 3g+3g, the only pair there was."""
    work = json.loads((shared / "reference/miso/profiles.json").read_text())["workloads"]
    names = ("transformer_train32", "gnn_train128")
    slices = ("7g.40gb", "4g.20gb", "3g.20gb", "2g.10gb", "1g.5gb")
    rows = np.array([[work[n]["speed"][s] for s in slices] for n in names])
    plan = best_partition(A100, rows, "throughput")
    assert plan is not None
    assert sorted(p.kind for p in plan.placements) == ["3g", "4g"]
    assert plan.objective == pytest.approx(max(rows[0, 1] + rows[1, 2], rows[0, 2] + rows[1, 1]))
    assert plan.objective > rows[0, 2] + rows[1, 2]
