"""MISO's state machine and planner, driven by hand: no processes, no GPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from miso_world import World

from cotenant.core.errors import InputError
from cotenant.core.events import Reason
from cotenant.core.mig import Placement, geometry
from cotenant.fleet.controller.miso import MisoPlanner
from cotenant.fleet.controller.miso_gpu import MisoGpu, Wish
from cotenant.fleet.jobs import JobSpec
from cotenant.fleet.nodes import NodeGpu, NodeSpec
from cotenant.fleet.state import Job
from cotenant.profiles.mig.mps_columns import predictor_input

A100 = geometry("A100-40GB", double_memory=False)


def test_a_job_alone_has_the_whole_gpu_and_is_not_measured() -> None:
    world = World()
    world.submit("a")
    assert world.tick() == {"a": Wish(1.0, 1.0)}
    share = world.plan.assign["a"].places[0].gpus[0]
    assert (share.fraction, share.mechanism) == (1.0, "whole")
    assert world.plan.assign["a"].places[0].cpus == 8.0


def test_two_jobs_are_measured_at_three_levels_and_the_steep_one_gets_the_larger_slice() -> None:
    """4g + 3g is the best layout for two; the steep job loses more by a small slice."""
    world = World()
    world.submit("a", "flat")
    world.submit("b", "steep")
    limits = []
    for _ in range(40):
        wishes = world.tick()
        if wishes["a"].slice:
            break
        limits.append(wishes["a"].limit)
        assert {world.plan.reasons[name] for name in "ab"} == {Reason.MEASURED}
        assert world.plan.assign["a"].places[0].gpus[0].limit == wishes["a"].limit
    assert list(dict.fromkeys(limits)) == [1.0, 0.5, 0.14]
    assert wishes == {"a": Wish(0.428571, 0.428571, "3g@4"), "b": Wish(0.571428, 0.571428, "4g@0")}
    assert world.planner.measurements == 1
    # input of the predictor: seconds per step of each job, and dummies in the other columns
    table = world.predictor.seen[0]
    assert table.shape == (3, 7)
    assert table[:, 0] == pytest.approx([0.1, 0.1, 0.1], rel=0.05)
    assert table[:, 1] == pytest.approx([0.1, 0.2, 0.1 / 0.14], rel=0.05)
    assert world.plan.assign["b"].speed == pytest.approx(0.6)


def test_who_stays_gets_the_part_of_who_leaves_without_being_measured_again() -> None:
    world = World()
    for name, kind in (("a", "flat"), ("b", "steep"), ("c", "steep")):
        world.submit(name, kind)
    world.until_sliced()
    measured = world.planner.measurements
    world.finish("c")
    wishes = world.tick()
    assert {wish.slice for wish in wishes.values()} == {"4g@0", "3g@4"}
    world.finish("b")
    assert world.tick() == {"a": Wish(1.0, 1.0)}
    assert world.planner.measurements == measured


def test_a_job_that_ends_while_it_is_measured_holds_up_nobody() -> None:
    world = World()
    for name in "abc":
        world.submit(name)
    world.tick()
    world.tick()
    world.finish("b")
    assert set(world.until_sliced()) == {"a", "c"}
    world.submit("d")
    world.tick()
    for name in ("a", "c"):
        world.finish(name)
    assert world.tick()["d"] == Wish(1.0, 1.0)  # d was alone before the measurement had ended, so it gets the whole GPU


def test_a_job_that_shows_no_steps_is_taken_to_be_slow_after_a_while() -> None:
    world = World()
    world.submit("a")
    world.submit("silent")
    world.tick()
    for _ in range(400):
        attempt = world.jobs["silent"].attempt
        if attempt is not None:
            attempt.progress = None
        wishes = world.tick()
        if all(wish.slice for wish in wishes.values()):
            break
    assert set(wishes) == {"a", "silent"}
    assert all(wish.slice for wish in wishes.values())


def test_jobs_spread_over_gpus_before_they_share_one() -> None:
    world = World(nodes=2)
    for name in "abc":
        world.submit(name)
    world.tick()
    nodes = {name: world.plan.assign[name].places[0].node for name in "abc"}
    assert nodes["a"] != nodes["b"]
    assert sorted(nodes.values()).count(nodes["c"]) == 2


def test_a_gang_waits_for_idle_gpus_and_nobody_passes_it() -> None:
    gpus = tuple(NodeGpu(f"g{i}", "A100-40GB", 40 << 30, "nvidia") for i in range(2))
    world = World()
    world.nodes = (NodeSpec("node-0", 8.0, 64 << 30, gpus),)
    world.submit("a")
    world.tick()
    world.submit("gang", gpus=2.0)
    world.submit("later")
    world.tick()
    assert world.plan.waiting["gang"] == Reason.GANG_TOO_LARGE_NOW
    assert "later" in world.plan.waiting
    world.finish("a")
    world.tick()
    assert [share.uuid for share in world.plan.assign["gang"].places[0].gpus] == ["g0", "g1"]
    assert "later" in world.plan.waiting


def test_between_rounds_only_an_idle_gpu_is_given_away() -> None:
    world = World()
    world.submit("a")
    world.tick()
    world.submit("b")
    world.tick(early=True)
    assert world.plan.waiting == {"b": Reason.GPUS_FULL}
    assert "b" in world.tick()


def test_a_stated_slice_is_the_least_that_a_job_gets() -> None:
    world = World()
    world.submit("a", "steep")
    world.submit("b", "steep")
    world.submit("c", "flat", slice="3g")
    wishes = world.until_sliced()
    assert wishes["c"].slice == "3g@4"
    with pytest.raises(InputError):
        world.planner.check(Job(0, "x", JobSpec("x", ("x",), slice="9g"), 0.0), world.nodes)
    with pytest.raises(InputError, match="no node has more than 1"):
        world.planner.check(Job(0, "x", JobSpec("x", ("x",), gpus=4.0), 0.0), world.nodes)


def test_a_new_controller_adopts_slices_that_exist() -> None:
    world = World()
    world.submit("a", "flat")
    world.submit("b", "steep")
    before = world.until_sliced()
    world.planner = MisoPlanner(model=world.predictor)  # type: ignore[arg-type]
    starts = {name: job.n for name, job in world.jobs.items()}
    assert world.tick() == before
    assert {name: job.n for name, job in world.jobs.items()} == starts  # no job was restarted


def test_a_new_controller_measures_again_what_was_being_measured() -> None:
    world = World()
    world.submit("a", "flat")
    world.submit("b", "steep")
    world.tick()
    before = world.tick()
    world.restart()
    starts = {name: job.n for name, job in world.jobs.items()}
    assert world.tick() == before == dict.fromkeys("ab", Wish(0.5, 1.0, measuring=True))
    assert {name: job.n for name, job in world.jobs.items()} == starts  # no job was restarted
    assert {wish.slice for wish in world.until_sliced().values()} == {"4g@0", "3g@4"}


def test_a_job_for_which_no_present_gpu_is_large_enough_holds_up_nobody() -> None:
    """The A100 has slices of 3g, the A30 has none."""
    world = World(2, models=("A100-40GB", "A30"))
    world.submit("wide", slice="3g")
    world.planner.check(world.jobs["wide"], world.nodes)
    world.planner.check(world.jobs["wide"], world.nodes[::-1])
    world.away = {"node-0"}
    world.submit("later")
    world.tick()
    assert (list(world.plan.assign), world.plan.waiting) == (["later"], {"wide": Reason.GANG_TOO_LARGE_NOW})
    world.away.clear()
    world.tick()
    assert world.plan.assign["wide"].places[0].node == "node-0"


@given(
    st.lists(st.sampled_from(["come", "come", "go", "tick", "away", "back", "lost", "restart"]), max_size=40),
    st.lists(
        st.tuples(st.sampled_from(["flat", "steep"]), st.sampled_from([None, None, "1g", "3g"])),
        min_size=20, max_size=20,
    ),
)  # fmt: skip
def test_no_gpu_is_ever_promised_twice(events: list[str], kinds: list[tuple[str, str | None]]) -> None:
    """Jobs come and go, nodes stop answering and return, with their jobs or without, and the controller restarts."""
    world = World(3, models=("A100-40GB", "A100-40GB", "A30"))
    come = 0
    for event in events:
        if event == "come" and come < 20:
            kind, least = kinds[come]
            world.submit(f"j{come}", kind, slice=least)
            come += 1
        elif event == "go" and world.here():
            world.finish(world.here()[0].id)
        elif event == "away":
            world.away.add(f"node-{len(world.jobs) % 3}")
        elif event == "back":
            world.away.clear()
        elif event == "lost":
            for job in world.jobs.values():
                if job not in world.here():
                    job.attempt = None
        elif event == "restart":
            world.restart()
        world.tick()
        held: dict[str, float] = {}
        cpus: dict[str, float] = {}
        for assignment in world.plan.assign.values():
            place = assignment.places[0]
            cpus[place.node] = cpus.get(place.node, 0.0) + place.cpus
            for share in place.gpus:
                held[share.uuid] = held.get(share.uuid, 0.0) + share.fraction
        assert all(total <= 1.0 for total in held.values())
        assert all(total <= 8.0 for total in cpus.values())
        here = {job.id for job in world.here()}
        assert set(world.plan.assign) | set(world.plan.waiting) == here
        assert not set(world.plan.assign) & set(world.plan.waiting)
        assert world.away.isdisjoint(cpus)
        for gpu in world.planner.gpus.values():
            places = [place for place in gpu.place.values() if place is not None]
            assert gpu.geo.fits(places)


def test_the_slices_of_a_gpu_never_add_up_to_more_than_it() -> None:
    """Rounded parts of every legal layout of every size."""
    from cotenant.core.mig import legal_layouts

    for gpu in ("A100-40GB", "H100-80GB", "H200", "A30"):
        geo = geometry(gpu)
        for layout in legal_layouts(geo):
            names = {f"j{i}": place for i, place in enumerate(layout)}
            if len(names) > 1:
                assert sum(wish.share for wish in MisoGpu(geo, place=dict(names)).wishes().values()) <= 1.0


def test_columns_without_a_job_are_dummies() -> None:
    table = predictor_input(np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert table.shape == (3, 7)
    assert table[:, :2].tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    assert (table[0, 2:] == 1.0).all()
    # with few other jobs, a dummy is not slower when it has fewer threads
    assert (np.diff(table[:, 2:], axis=0) < 0).all()
    seven = np.arange(1.0, 22.0).reshape(3, 7)
    assert predictor_input(seven) is seven
    with pytest.raises(ValueError, match=r"must have the shape \(3, 1 to 7\)"):
        predictor_input(np.ones((2, 3)))


def test_placements_survive_in_the_share() -> None:
    gpu = MisoGpu(A100, place={"a": Placement(4, "3g"), "b": Placement(0, "2g")})
    assert gpu.wishes()["a"].slice == "3g@4"
    assert gpu.wishes()["b"].slice == "2g@0"
