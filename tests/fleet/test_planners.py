"""From a view to GPUs by name: who keeps what, shares, slices, profiles, and what can never be planned."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from cotenant.core.errors import InputError
from cotenant.core.events import Reason
from cotenant.fleet.controller.gpuchoice import GpuChooser
from cotenant.fleet.controller.planners import JobPlanner, View, cluster_of
from cotenant.fleet.controller.profiles import ProfileBook
from cotenant.fleet.jobs import JobSpec
from cotenant.fleet.nodes import MigInstance, NodeGpu, NodeSpec, node_from_dict, pretend_nodes
from cotenant.fleet.state import PARKED, UP, Assignment, Attempt, GpuShare, Job, Place, assignment_from_dict
from cotenant.policy.jobs.choice import JobPolicy

GIB = 1 << 30
NODES = pretend_nodes(2, 2, "A100-40GB", 40 * GIB, 6.0, 125 * 10**9)
BOOK = ProfileBook()


def planner(ordering: str = "fifo", allotment: str = "tune", *, sticky: bool = True) -> JobPlanner:
    return JobPlanner(JobPolicy(ordering, allotment, sticky=sticky), BOOK)


def job(row: int, gpus: float = 1.0, **more: Any) -> Job:
    return Job(row, f"j{row}", JobSpec(f"j{row}", ("true",), gpus, **more), float(row), arrived=True)


def at(node: str, *gpus: int, cpus: float = 3.0) -> Assignment:
    shares = tuple(GpuShare(f"{node}-gpu-{k}") for k in gpus)
    return Assignment((Place(node, shares, cpus * len(gpus), 62_500_000_000 * len(gpus)),), level=1)


def running(row: int, held: Assignment, phase: str = UP, **more: Any) -> Job:
    found = job(row, sum(g for _, g in held.gpus_by_node()), **more)
    found.attempt, found.n = Attempt(0, held, phase, started_s=0.0), 1
    return found


def where(assignment: Assignment) -> list[str]:
    return [share.uuid for place in assignment.places for share in place.gpus]


def test_jobs_get_gpus_in_order_and_the_rest_is_told_why() -> None:
    plan = planner().plan(View(0.0, NODES, (job(0, 2.0), job(1), job(2, 2.0), job(3))))
    assert {name: where(a) for name, a in plan.assign.items()} == {
        "j0": ["node-0-gpu-0", "node-0-gpu-1"], "j1": ["node-1-gpu-0"], "j3": ["node-1-gpu-1"],
    }  # fmt: skip
    assert plan.waiting == {"j2": Reason.GANG_TOO_LARGE_NOW}
    assert (plan.assign["j1"].cpus, plan.assign["j1"].memory_bytes) == (3.0, 62_500_000_000)


def test_a_gang_on_unlike_nodes_gets_of_each_what_it_has() -> None:
    """Three GPUs with 2 cores each and one with 8: equal parts for the ranks would be more than the first node has."""
    few, many = pretend_nodes(1, 3, "A100-40GB", 40 * GIB, 6.0, 90 * 10**9), pretend_nodes(2, 1, "A100-40GB", 40 * GIB,
                                                                                          8.0, 120 * 10**9)  # fmt: skip
    view = View(0.0, (*few, many[1]), (job(0, 4.0),))
    given = planner(allotment="proportional").plan(view).assign["j0"]
    assert {p.node: (p.cpus, p.memory_bytes) for p in given.places} == {
        "node-0": (6.0, 90 * 10**9), "node-1": (8.0, 120 * 10**9),
    }  # fmt: skip
    again = planner(allotment="proportional").plan(View(1.0, view.nodes, (running(0, given),))).assign["j0"]
    assert again == given


def test_who_keeps_running_keeps_the_very_gpus() -> None:
    held = running(5, at("node-1", 1))
    plan = planner().plan(View(9.0, NODES, (job(0), held)))
    assert where(plan.assign["j5"]) == ["node-1-gpu-1"]
    assert plan.assign["j5"].same_gpus(at("node-1", 1))
    assert where(plan.assign["j0"]) == ["node-0-gpu-0"]


def test_a_parked_job_goes_on_where_it_is_and_others_make_do_with_an_equal_node() -> None:
    parked = running(0, at("node-1", 0, 1), PARKED)
    plan = planner().plan(View(9.0, NODES, (parked, job(1, 2.0))))
    assert where(plan.assign["j0"]) == ["node-1-gpu-0", "node-1-gpu-1"]
    assert where(plan.assign["j1"]) == ["node-0-gpu-0", "node-0-gpu-1"]


def test_gpus_of_jobs_that_are_not_to_be_planned_are_not_given_away() -> None:
    plan = planner().plan(View(9.0, NODES[:1], (job(0), job(1)), held=(at("node-0", 0),)))
    assert {name: where(a) for name, a in plan.assign.items()} == {"j0": ["node-0-gpu-1"]}
    assert plan.waiting == {"j1": Reason.GPUS_FULL}


def test_shares_fill_a_gpu_before_another_is_begun_and_mechanisms_do_not_mix() -> None:
    jobs = (job(0, 0.5), job(1, 0.4), job(2, 0.3), job(3, 0.1, mechanism="mps"))
    plan = planner().plan(View(0.0, NODES[:1], jobs))
    found = {name: a.places[0].gpus[0] for name, a in plan.assign.items()}
    assert found["j0"] == GpuShare("node-0-gpu-0", 0.5, "time")
    assert found["j1"] == GpuShare("node-0-gpu-0", 0.4, "time")
    assert found["j2"] == GpuShare("node-0-gpu-1", 0.3, "time")
    assert "j3" not in found  # both GPUs are shared by turns, so j3 finds none
    assert plan.waiting["j3"] == Reason.GPUS_FULL


def test_shares_stay_on_the_gpus_that_they_are_of() -> None:
    """0.5 and 0.5 on one GPU, 0.3 and 0.7 on the other: in order of arrival, they would not fit so."""
    shares = ((0, 0.5), (1, 0.3), (0, 0.5), (1, 0.7))
    held = [Assignment((Place("node-0", (GpuShare(f"node-0-gpu-{gpu}", part, "time"),), 3.0 * part, GIB),), level=1)
            for gpu, part in shares]  # fmt: skip
    jobs = [running(row, one) for row, one in enumerate(held)]
    plan = planner().plan(View(9.0, NODES[:1], tuple(jobs)))
    assert all(plan.assign[job.id].same_gpus(one) for job, one in zip(jobs, held, strict=True))


def test_a_pinned_job_is_not_preempted_whatever_its_key() -> None:
    held = running(1, at("node-0", 0, 1), duration_s=1000.0)
    short = job(0, 2.0, duration_s=1.0)
    free = planner("srtf").plan(View(9.0, NODES[:1], (short, held)))
    assert list(free.assign) == ["j0"]
    pinned = planner("srtf").plan(View(9.0, NODES[:1], (short, held), pinned=frozenset({"j1"})))
    assert list(pinned.assign) == ["j1"]


def test_a_pinned_job_keeps_its_gpus_whatever_is_reserved() -> None:
    policy = JobPolicy("srtf", reserve_after_s=100.0)
    held = running(1, at("node-1", 0, 1), duration_s=1000.0)
    view = View(900.0, NODES, (job(0, 4.0), held, job(2, 2.0)), pinned=frozenset({"j1"}))
    plan = JobPlanner(policy, BOOK).plan(view)
    assert {name: where(a) for name, a in plan.assign.items()} == {
        "j1": ["node-1-gpu-0", "node-1-gpu-1"], "j2": ["node-0-gpu-0", "node-0-gpu-1"],
    }  # fmt: skip
    assert not plan.assign["j1"].reserved


def test_between_rounds_only_what_is_free_is_given() -> None:
    """The short job would go first in a round; the running one has all cores of the node."""
    held = running(1, at("node-0", 0, cpus=6.0), duration_s=1000.0)
    short, long = job(0, 2.0, duration_s=1.0), job(2, 1.0, duration_s=5000.0)
    early = planner("srtf", "proportional").plan(View(9.0, NODES, (short, held, long), early=True))
    assert early.assign["j1"] is held.attempt.assignment  # type: ignore[union-attr]
    assert {name: where(early.assign[name]) for name in early.assign if name != "j1"} == {
        "j0": ["node-1-gpu-0", "node-1-gpu-1"]
    }
    assert early.waiting == {"j2": Reason.NO_CPU_OR_MEMORY}


def test_what_lost_jobs_hold_is_not_planned() -> None:
    """The job that is not planned holds GPU 1 and five of the six cores, so only what is left can be given."""
    lost = Place("gone", (GpuShare("g"),), 9.0, GIB)
    held = Assignment((Place("node-0", (GpuShare("node-0-gpu-1"),), 5.0, GIB), lost))
    plan = planner(allotment="proportional").plan(View(9.0, NODES, (job(0), job(1, 2.0)), held=(held,)))
    assert {name: a.gpus_by_node() for name, a in plan.assign.items()} == {"j0": [("node-1", 1.0)]}
    part = Assignment((Place("node-0", (GpuShare("node-0-gpu-1", 0.5, "time"),), 1.0, GIB),))
    plan = planner().plan(View(9.0, NODES[:1], (job(0), job(1, 0.5), job(2, 0.6)), held=(part,)))
    assert {name: where(a) for name, a in plan.assign.items()} == {"j0": ["node-0-gpu-0"], "j1": ["node-0-gpu-1"]}


def test_a_running_gang_is_not_grown_above_its_nodes_when_a_larger_one_returns() -> None:
    """With the large node, the ideal demand of the gang is no more clipped to that of the small nodes."""
    small = pretend_nodes(2, 4, "A100-40GB", 40 * GIB, 16.0, 100 * 10**9)
    large = dataclasses.replace(
        pretend_nodes(3, 8, "A100-40GB", 40 * GIB, 64.0, 800 * 10**9)[2],
        gpus=tuple(NodeGpu(f"large-{k}", "A100-40GB", 40 * GIB) for k in range(8)),
    )
    gang = job(0, 8.0, memory_bytes=400 * 10**9, cpus=64.0)
    other = tuple(job(row, 8.0, priority=1) for row in (1,))
    for allotment in ("tune", "greedy", "proportional"):
        made = planner(allotment=allotment)
        first = made.plan(View(0.0, small, (gang,))).assign["j0"]
        assert [p.memory_bytes for p in first.places] == [100 * 10**9, 100 * 10**9]
        held = running(0, first, memory_bytes=400 * 10**9, cpus=64.0)
        plan = made.plan(View(60.0, (*small, large), (held, *other)))
        for given in plan.assign.values():
            for place in given.places:
                most = {n.name: n for n in (*small, large)}[place.node]
                assert place.memory_bytes <= most.memory_bytes
                assert place.cpus <= most.cpus
        assert allotment == "greedy" or plan.assign["j0"].same_gpus(first)


def test_a_job_whose_gpus_are_gone_is_planned_on_others() -> None:
    held = running(0, at("node-0", 0, 1))
    node = dataclasses.replace(NODES[0], gpus=NODES[0].gpus[1:])
    plan = planner().plan(View(9.0, (node, NODES[1]), (held,)))
    assert where(plan.assign["j0"]) == ["node-0-gpu-1", "node-1-gpu-0"]


def test_a_parked_job_takes_no_gpu_from_one_of_higher_priority() -> None:
    """The policy puts the first job on node-0 and the parked one on node-1, which has other amounts of CPU."""
    parked, first = running(0, at("node-0", 0, 1), PARKED), job(1, 2.0, priority=1)
    nodes = (NODES[0], dataclasses.replace(NODES[1], cpus=8.0))
    plan = planner("las", "proportional").plan(View(9.0, nodes, (parked, first)))
    assert where(plan.assign["j1"]) == ["node-0-gpu-0", "node-0-gpu-1"]


def test_optimal_leaves_jobs_without_a_profile_their_cpu_and_memory() -> None:
    plan = planner(allotment="optimal").plan(View(0.0, NODES, (job(0), job(1, 0.25, mechanism="time"))))
    assert [(a.cpus, a.memory_bytes) for a in plan.assign.values()] == [(3.0, 62_500 * 10**6), (0.75, 15_625 * 10**6)]


def test_gpus_with_instances_have_their_part_of_cpu_and_memory() -> None:
    gpus = (NodeGpu("whole", "H100-80GB", 80 * GIB), NodeGpu("cut", "H100-80GB", 80 * GIB, "nvidia",
                                                              (MigInstance("MIG-a", "7g.80gb"),)))  # fmt: skip
    node = NodeSpec("n", 16.0, 10**11, gpus)
    plan = planner(allotment="proportional").plan(View(0.0, (node,), (job(0), job(1, 0.99, slice="7g", cpus=99.0))))
    assert {name: (a.cpus, a.memory_bytes) for name, a in plan.assign.items()} == {
        "j0": (8.0, 5 * 10**10), "j1": (8.0, 5 * 10**10),
    }  # fmt: skip


def test_slices_are_instances_that_exist() -> None:
    instances = (MigInstance("MIG-a", "2g.20gb"), MigInstance("MIG-b", "3g.40gb"), MigInstance("MIG-c", "2g.20gb"))
    node = NodeSpec("mig", 14.0, 10**11, (NodeGpu("GPU-m", "H100-80GB", 80 * GIB, "nvidia", instances),))
    jobs = tuple(job(i, 0.285, slice=s) for i, s in enumerate(("2g", "2g.20gb", "2g", "3g.40gb")))
    plan = planner().plan(View(0.0, (node,), jobs))
    got = {name: (s.instance, s.slice) for name, a in plan.assign.items() for p in a.places for s in p.gpus}
    assert got == {"j0": ("MIG-a", "2g.20gb"), "j1": ("MIG-c", "2g.20gb"), "j3": ("MIG-b", "3g.40gb")}
    assert plan.waiting == {"j2": Reason.GPUS_FULL}
    assert plan.assign["j0"].cpus == pytest.approx(4.0)
    again = running(0, plan.assign["j0"], slice="2g")
    again.spec = jobs[0].spec
    assert planner().plan(View(1.0, (node,), (again,))).assign["j0"] is again.attempt.assignment  # type: ignore[union-attr]
    whole = planner().plan(View(0.0, (node, *NODES), (job(9),)))
    # the first GPU is in MIG mode, so it cannot be given as a whole
    assert where(whole.assign["j9"]) == ["node-0-gpu-0"]


def test_without_nodes_everybody_waits() -> None:
    assert planner().plan(View(0.0, (), (job(0),))).waiting == {"j0": Reason.GPUS_FULL}
    too_large = planner().plan(View(0.0, NODES[:1], (job(0, 4.0), job(1))))
    assert too_large.waiting == {"j0": Reason.GANG_TOO_LARGE_NOW}
    assert list(too_large.assign) == ["j1"]


@pytest.mark.parametrize(
    ("more", "field"),
    [({"gpus": 5.0}, "gpus"), ({"slice": "2g"}, "slice"), ({"model": "nope"}, "model"),
     ({"profile": "/no/such.json"}, None)],
)  # fmt: skip
def test_what_can_never_run_is_refused(more: dict[str, Any], field: str | None) -> None:
    spec = JobSpec("a", ("true",), **more)
    with pytest.raises(InputError) as caught:
        planner().check(Job(-1, "a", spec, 0.0), NODES)
    assert caught.value.field == field


def test_a_gpu_that_the_catalog_does_not_know_is_as_good_as_itself() -> None:
    node = NodeSpec("n", 4.0, 10**10, (NodeGpu("GPU-x", "NVIDIA Z9000", 10 * GIB, "nvidia"),))
    assert cluster_of([node]).gpu_models == ("NVIDIA Z9000",)
    assert list(planner().plan(View(0.0, (node,), (job(0),))).assign) == ["j0"]


def test_a_profile_file_is_found_by_its_only_model(tmp_path: Path) -> None:
    import json

    file = tmp_path / "p.json"
    file.write_text(
        json.dumps(
            {"cpus_per_gpu": [1, 2, 4], "memory_gb_per_gpu": [10],
             "models": {"mine": {"iteration_s": 0.5, "throughput": [[0.5], [1.0], [2.0]]}}}
        )
    )  # fmt: skip
    book = ProfileBook()
    spec = JobSpec("a", ("true",), profile=str(file), iterations=100.0)
    assert book.key(spec) == f"{file}:mine"
    plan = JobPlanner(JobPolicy(sticky=True), book).plan(View(0.0, NODES, (Job(0, "a", spec, 0.0, arrived=True),)))
    assert plan.assign["a"].cpus == 4.0  # as many as the job can use
    # relative to three cores, whose speed is half way between 1.0 and 2.0
    assert plan.assign["a"].speed == pytest.approx(2.0 / 1.5)


def test_choosing_and_giving_back() -> None:
    chooser = GpuChooser(NODES)
    first = chooser.choose("node-0", 0.6, "time")
    assert first is not None
    assert chooser.choose("node-0", 2.0, "time") is None
    chooser.give_back([first])
    whole = chooser.choose("node-0", 2.0, "time")
    assert whole is not None
    assert [share.uuid for share in whole] == ["node-0-gpu-0", "node-0-gpu-1"]
    assert not chooser.keep(at("node-0", 0))
    assert not chooser.keep(at("gone", 0))
    assert chooser.choose("gone", 1.0, "time") is None


def test_plain_data_and_back() -> None:
    assignment = Assignment((Place("n", (GpuShare("g", 0.3, "mig", "2g", "MIG-1"),), 1.5, 7),), 2, 1.25)
    assert assignment_from_dict(assignment.to_dict()) == assignment
    node = NodeSpec("n", 2.0, 9, (NodeGpu("g", "m", 1, "nvidia", (MigInstance("u", "1g"),)),), (0, 1), "/run/a")
    assert node_from_dict(node.to_dict()) == node
