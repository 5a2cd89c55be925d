"""Plans of job policies for drawn fleets in which nodes and GPU models come and go and jobs arrive, end and are
preempted. What must hold in each round is taken from the documentation."""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.fleet.controller.planners import FleetPlan, JobPlanner, View
from cotenant.fleet.controller.profiles import ProfileBook
from cotenant.fleet.jobs import JobSpec
from cotenant.fleet.nodes import NodeGpu, NodeSpec
from cotenant.fleet.state import PARKED, STARTING, STOPPING, UP, Assignment, Attempt, Job
from cotenant.policy.jobs.choice import JobPolicy

GB = 10**9
BOOK = ProfileBook()
#: GPU model, GPUs, cores and memory of the kinds of node
KINDS = (
    ("A100-40GB", 4, 12.0, 250 * GB), ("A100-40GB", 2, 8.0, 60 * GB), ("V100-16GB", 8, 64.0, 600 * GB),
    ("V100-16GB", 1, 3.0, 20 * GB), ("K80", 3, 10.0, 100 * GB),
)  # fmt: skip
MODELS = ("", "", "res18", "gnmt", "deepspeech", "alexnet")


def node(name: str, kind: tuple[str, int, float, int], version: int) -> NodeSpec:
    model, gpus, cpus, memory = kind
    return NodeSpec(
        name, cpus, memory, tuple(NodeGpu(f"{name}.{version}-{k}", model, 40 * GB) for k in range(gpus))
    )


class World:
    """A fleet that changes at random, and carries out each plan at once, but for jobs that take time to stop."""

    def __init__(self, seed: int, policy: JobPolicy) -> None:
        self.draw, self.policy = random.Random(seed), policy
        self.planner = JobPlanner(policy, BOOK, 60.0)
        self.mechanisms = self.draw.choice((("time",), ("time", "mps")))
        self.versions = 0
        self.nodes: dict[str, NodeSpec] = {}
        self.up: set[str] = set()
        for i in range(self.draw.randint(1, 4)):
            self.replace(f"node-{i}")
        self.jobs: list[Job] = []
        self.now_s, self.rows = 0.0, 0

    def replace(self, name: str) -> None:
        """The node is another machine from now on, with other GPUs."""
        self.versions += 1
        self.nodes[name] = node(name, self.draw.choice(KINDS), self.versions)
        self.up.add(name)

    def arrive(self) -> None:
        draw, row = self.draw, self.rows
        self.rows += 1
        gpus = draw.choice((0.25, 0.5, 0.5, 1.0, 1.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0))
        spec = JobSpec(
            f"j{row}", ("true",), gpus, model=draw.choice(MODELS), priority=draw.randint(0, 1),
            cpus=draw.choice((None, None, 1.0 * gpus, 5.0 * gpus, 30.0)),
            memory_bytes=draw.choice((None, None, 10 * GB, int(60 * GB * gpus), 500 * GB)),
            duration_s=draw.choice((100.0, 3000.0, 90000.0)), mechanism=draw.choice(self.mechanisms),
        )  # fmt: skip
        self.jobs.append(Job(row, f"j{row}", spec, self.now_s, arrived=True))

    def change(self) -> None:
        """Let time pass: jobs arrive, end or make progress; nodes go, return or are replaced."""
        draw = self.draw
        self.now_s += draw.choice((60.0, 600.0))
        for name in list(self.nodes):
            luck = draw.random()
            if luck < 0.1:
                self.up.discard(name)
            elif luck < 0.25:
                self.up.add(name)
            elif luck < 0.32:
                self.replace(name)
        if draw.random() < 0.1:
            self.replace(f"node-{len(self.nodes)}")
        for job in list(self.jobs):
            if job.attempt is None:
                continue
            attempt = job.attempt
            there = {gpu.uuid for name in self.up for gpu in self.nodes[name].gpus}
            held = gpus_of(job)
            if attempt.phase == STOPPING or (any(n in self.up for n in attempt.nodes) and not held & there):
                job.attempt = None  # the processes have ended, with the machine or as they were asked to
            elif draw.random() < 0.1 and attempt.phase != PARKED:
                self.jobs.remove(job)
            elif attempt.phase in (STARTING, UP):
                attempt.phase, job.last_run_s = UP, self.now_s
                job.attained_s += 60.0
                job.done = min(1.0, job.done + draw.random() / 10)
        for _ in range(draw.choice((0, 0, 1, 1, 2, 5))):
            self.arrive()

    def view(self) -> View:
        """What the controller gives a planner: jobs on nodes that do not answer are held, not planned."""
        jobs = tuple(j for j in self.jobs if j.attempt is None or all(n in self.up for n in j.attempt.nodes))
        mine = {job.id for job in jobs}
        held = tuple(
            j.attempt.assignment for j in self.jobs
            if j.id not in mine and j.attempt is not None and j.attempt.phase != PARKED
        )  # fmt: skip
        pinned = frozenset(j.id for j in jobs if holds(j) and self.draw.random() < 0.1)
        nodes = tuple(self.nodes[name] for name in sorted(self.up))
        return View(self.now_s, nodes, jobs, self.draw.random() < 0.3, pinned, held)

    def carry_out(self, view: View, plan: FleetPlan) -> None:
        """As controller/apply.py does: an early plan only starts jobs."""
        for job in view.jobs:
            attempt, target = job.attempt, plan.assign.get(job.id)
            if attempt is None:
                if target is not None:
                    job.attempt = Attempt(job.n, target, self.draw.choice((STARTING, UP)), started_s=0.0)
                    job.n += 1
            elif view.early:
                continue
            elif target is None:
                if attempt.phase != PARKED:
                    job.attempt = dataclasses.replace(attempt, phase=PARKED) if self.draw.random() < 0.4 else None
            elif not target.same_gpus(attempt.assignment):
                job.attempt, job.n = Attempt(job.n, target, UP, started_s=0.0), job.n + 1
            else:
                attempt.assignment, attempt.phase = target, UP


def holds(job: Job) -> bool:
    return job.attempt is not None and job.attempt.phase in (STARTING, UP)


def uuids(assignment: Assignment) -> set[str]:
    return {share.uuid for place in assignment.places for share in place.gpus}


def gpus_of(job: Job) -> set[str]:
    assert job.attempt is not None
    return uuids(job.attempt.assignment)


def used(assignments: list[Assignment]) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """GPUs by UUID, cores by node and bytes by node."""
    gpus, cpus, memory = (defaultdict[str, float](float) for _ in range(3))
    for assignment in assignments:
        for place in assignment.places:
            cpus[place.node] += place.cpus
            memory[place.node] += place.memory_bytes
            for share in place.gpus:
                gpus[share.uuid] += share.fraction
    return gpus, cpus, memory


def within(view: View, assignments: list[Assignment]) -> None:
    """No GPU, core or byte of a node is given twice. What is held on a machine that was replaced does not count."""
    there = {gpu.uuid for one in view.nodes for gpu in one.gpus}
    here = [
        Assignment(tuple(p for p in one.places if there.intersection(share.uuid for share in p.gpus)))
        for one in (*assignments, *view.held)
    ]  # fmt: skip
    gpus, cpus, memory = used(here)
    assert all(part <= 1 + 1e-6 for part in gpus.values()), gpus
    for one in view.nodes:
        assert cpus[one.name] <= one.cpus + 1e-6, one.name
        assert memory[one.name] <= one.memory_bytes * (1 + 1e-6), one.name


def check(world: World, view: View, plan: FleetPlan) -> None:
    jobs, nodes = {job.id: job for job in view.jobs}, {one.name: one for one in view.nodes}
    assert not set(plan.assign) & set(plan.waiting)
    assert set(plan.assign) | set(plan.waiting) == set(jobs)
    within(view, list(plan.assign.values()))
    for name, got in plan.assign.items():
        if view.early and holds(jobs[name]):
            continue
        spec = jobs[name].spec
        assert len({place.node for place in got.places}) == len(got.places)
        assert sum(gpus for _, gpus in got.gpus_by_node()) == pytest.approx(spec.gpus)
        for place in got.places:
            assert {share.uuid for share in place.gpus} <= {gpu.uuid for gpu in nodes[place.node].gpus}
            assert place.cpus >= 0
            assert place.memory_bytes >= 0
    there = {gpu.uuid for one in view.nodes for gpu in one.gpus}
    running = [job for job in view.jobs if holds(job)]
    if view.early:  # between rounds only free resources are assigned
        for job in running:
            assert job.attempt is not None
            assert plan.assign.get(job.id) == job.attempt.assignment
    running = [job for job in running if there.issuperset(gpus_of(job))]
    for job in running:
        assert job.id not in view.pinned or gpus_of(job) == uuids(plan.assign[job.id])
    waits = [jobs[name] for name in plan.waiting]
    if not plan.assign and not view.held and world.policy.allotment != "greedy":  # the whole cluster is idle
        assert all(job.spec.gpus > sum(len(one.gpus) for one in view.nodes) for job in waits)
    if len(world.mechanisms) > 1:  # policies do not know that jobs of different mechanisms do not share a GPU
        return
    parked = any(job.attempt is not None and job.attempt.phase == PARKED for job in view.jobs)
    if world.policy.allotment in ("proportional", "tune") and not (view.early or view.held or parked):
        # No GPU is idle for lack of CPU and memory. (Parts of GPUs that are placed again each round may stay apart.)
        taken = set().union(*map(uuids, plan.assign.values()))
        parts = not world.policy.sticky and any(job.spec.gpus < 1 for job in view.jobs)
        assert parts or there <= taken or all(job.spec.gpus != 1 for job in waits)
    # Spot jobs take no GPU from a guaranteed job that runs, unless they have a reservation. The key of ftf depends on
    # the number of jobs, so that the guaranteed jobs alone have another order. Under greedy a job waits if its ideal
    # demand, which grows with the largest node, does not fit any more.
    policy = world.policy
    if policy.ordering == "ftf" or policy.allotment == "greedy" or policy.reserve_after_s < float("inf"):
        return
    lost = [job for job in running if job.spec.priority > 0 and job.id in plan.waiting]
    if lost:
        guaranteed = tuple(job for job in view.jobs if job.spec.priority > 0 or job.id in view.pinned)
        alone = world.planner.plan(dataclasses.replace(view, jobs=guaranteed))
        assert all(job.id in alone.waiting for job in lost)


def follow(seed: int, policy: JobPolicy, rounds: int = 12) -> None:
    world = World(seed, policy)
    for _ in range(rounds):
        world.change()
        view = world.view()
        plan = world.planner.plan(view)
        check(world, view, plan)
        world.carry_out(view, plan)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6), ordering=st.sampled_from(("fifo", "srtf", "las", "ftf", "drf")),
    allotment=st.sampled_from(("proportional", "greedy", "tune", "optimal")),
    placement=st.sampled_from(("first-fit", "consolidate", "spread")), sticky=st.booleans(),
    reserve=st.sampled_from((float("inf"), 1200.0)),
)  # fmt: skip
def test_every_plan_holds(
    seed: int, ordering: str, allotment: str, placement: str, sticky: bool, reserve: float
) -> None:  # fmt: skip
    more: dict[str, Any] = {"sticky": sticky, "reserve_after_s": reserve}
    follow(seed, JobPolicy(ordering, allotment, placement, **more))
