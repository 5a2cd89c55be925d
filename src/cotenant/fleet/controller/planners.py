"""Planners: decide which jobs run on which GPUs, from the controller's view of the fleet. A planner has no clock and
sends no orders."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.core.cluster import Cluster, NodeGroup
from cotenant.core.errors import InputError
from cotenant.core.events import Reason
from cotenant.core.gpus import Gpu, find_gpu
from cotenant.core.plan import Grant, Snapshot
from cotenant.core.work import Jobs
from cotenant.fleet.controller.gpuchoice import GpuChooser, Room
from cotenant.fleet.controller.profiles import ProfileBook
from cotenant.fleet.jobs import JobSpec
from cotenant.fleet.nodes import NodeGpu, NodeSpec
from cotenant.fleet.state import PARKED, STOPPING, Assignment, Job, Place
from cotenant.policy.jobs.choice import JobPolicy
from cotenant.policy.jobs.demand import runnable_jobs
from cotenant.policy.jobs.plan import plan_jobs


@dataclass(frozen=True)
class View:
    """Input of a planner: time in seconds of the fleet's clock (controller/clock.py), responsive nodes, arrived and
    unfinished jobs.

    Jobs are the controller's own objects, to be read only during the call. `early`: the plan is made between two
    rounds, such as when a job arrives or GPUs become free. It may assign only free resources, so it should keep all
    running jobs. `pinned`: ids of jobs that would lose all their work if they were stopped now, and have lost it
    before. `held`: resources of jobs that cannot be planned because one of their nodes does not answer.
    """

    now_s: float
    nodes: tuple[NodeSpec, ...]
    jobs: tuple[Job, ...]
    early: bool = False
    pinned: frozenset[str] = frozenset()
    held: tuple[Assignment, ...] = ()


@dataclass
class FleetPlan:
    """A plan: the jobs to run, with their assignments; a running job that is not named stops. `waiting`: why the other
    jobs wait. `reasons`: why the named jobs run.
    """

    assign: dict[str, Assignment] = field(default_factory=dict)
    waiting: dict[str, Reason] = field(default_factory=dict)
    reasons: dict[str, Reason] = field(default_factory=dict)


class Planner(Protocol):
    """Interface of a policy that decides for the fleet."""

    def plan(self, view: View) -> FleetPlan:
        """Return the complete plan for the state of the fleet in the view. It may also depend on earlier views, if the
        planner measures jobs.
        """

    def check(self, job: Job, nodes: Iterable[NodeSpec]) -> None:
        """Raise InputError if the job could never be planned on these nodes."""

    def describe(self) -> dict[str, Any]:
        """The planner's name, as `label`, and its options by name, for status and for records of the fleet."""

    def fault(self) -> str:
        """Return in one sentence why the planner cannot plan for some jobs, such as a missing profile; "" if it can
        plan for all.
        """

    def warm_up(self) -> None:
        """Compile or load everything that decisions need, before the controller runs."""


class JobPlanner:
    """A Planner by ordering, allotment and placement, with the same functions as the simulator. Attained service is
    counted in whole leases of `lease_s`. If it were counted in milliseconds, the order of jobs that ran equally often
    would depend on how long their programs took to start.
    """

    def __init__(self, policy: JobPolicy, profiles: ProfileBook, lease_s: float = 0.0) -> None:
        self.policy, self.profiles, self.lease_s = policy, profiles, lease_s

    def describe(self) -> dict[str, Any]:
        policy = self.policy
        return {
            "label": policy.label(),
            "ordering": policy.ordering,
            "allotment": policy.allotment,
            "placement": policy.placement,
            "sticky": policy.sticky,
        }

    def fault(self) -> str:
        return self.profiles.fault()

    def warm_up(self) -> None:
        gpus = tuple(NodeGpu(f"gpu-{k}", "A100-40GB", 40 << 30) for k in range(2))
        spec = JobSpec("warm-up", ("true",), gpus=2.0, duration_s=1.0)
        jobs = (Job(0, "a", spec, 0.0), Job(1, "b", dataclasses.replace(spec, gpus=1.0), 0.0))
        for early in (False, True):
            self.plan(View(0.0, (NodeSpec("node-0", 6.0, 125 * 10**9, gpus),), jobs, early))

    def check(self, job: Job, nodes: Iterable[NodeSpec]) -> None:
        found = tuple(nodes)
        self.profiles.key(job.spec)
        if job.spec.slice is not None:
            existing = [instance for node in found for gpu in node.gpus for instance in gpu.instances]
            if found and not any(instance.satisfies(job.spec.slice) for instance in existing):
                raise InputError(f"no GPU of the fleet has a MIG instance {job.spec.slice}", field="slice")
            return
        total = sum(len(node.plain_gpus) for node in found)
        if found and job.spec.gpus > total:
            raise InputError(f"{job.spec.gpus:g} GPUs are requested and the fleet has {total}", field="gpus")

    def plan(self, view: View) -> FleetPlan:
        plan = FleetPlan()
        nodes = tuple(node for node in view.nodes if node.plain_gpus)
        chooser = GpuChooser(view.nodes)
        for assignment in view.held:
            chooser.hold(assignment)
        slices = [job for job in view.jobs if job.spec.slice is not None]
        for job in slices:
            self._slice(job, view, chooser, plan)
        whole = [job for job in view.jobs if job.spec.slice is None]
        if not nodes:
            plan.waiting |= {job.id: Reason.GPUS_FULL for job in whole}
            return plan
        names = {node.name: i for i, node in enumerate(nodes)}
        held = [grant for assignment in view.held for grant in _held("", assignment, nodes, names)]
        if view.early:
            for job in whole:
                if job.attempt is not None and job.attempt.phase not in (PARKED, STOPPING):
                    plan.assign[job.id] = job.attempt.assignment
                    held += _held(job.id, job.attempt.assignment, nodes, names)
                    chooser.hold(job.attempt.assignment)
        cluster, base = _cluster(nodes), reference_share(nodes)
        jobs = jobs_of(whole, self.profiles)
        fits = runnable_jobs(jobs, cluster)
        for row in np.flatnonzero(~fits).tolist():
            if whole[row].id not in plan.assign:
                plan.waiting[whole[row].id] = Reason.GANG_TOO_LARGE_NOW
        known = [whole[row] for row in np.flatnonzero(fits).tolist()]
        if not known:
            return plan
        running = [grant for job in known if (grant := _grant(job, nodes, names)) is not None]
        snapshot = Snapshot(
            cluster=cluster,
            jobs=jobs.take(np.flatnonzero(fits)),
            done=np.minimum(np.array([job.done for job in known]), 0.999999),
            attained_s=np.array([self._attained_s(job) for job in known]),
            last_run_s=np.array([job.last_run_s if job.n else job.arrival_s for job in known]),
            running=() if view.early else tuple(running),
            pinned=view.pinned,
            held=tuple(held),
        )
        decided = plan_jobs(snapshot, view.now_s, self.policy, self.profiles.merged(base))
        by_id = {job.id: job for job in known}
        room = Room(nodes, [*view.held, *plan.assign.values()])
        self._place(decided.grants, by_id, nodes, chooser, room, plan)
        plan.waiting |= decided.waiting
        return plan

    def _attained_s(self, job: Job) -> float:
        return round(job.attained_s / self.lease_s) * self.lease_s if self.lease_s > 0 else job.attained_s

    def _place(
        self, grants: tuple[Grant, ...], by_id: dict[str, Job], nodes: tuple[NodeSpec, ...], chooser: GpuChooser,
        room: Room, plan: FleetPlan,
    ) -> None:  # fmt: skip
        """Choose GPUs. Running jobs that stay on their nodes keep theirs. Then others get some, by reservation and
        priority; among equals, parked jobs keep theirs before others get some, in the order of `grants`."""

        def stays(grant: Grant) -> bool:
            return self._stay(grant, by_id[grant.job], nodes, chooser, room, plan)

        left = [grant for grant in grants if _parked(by_id[grant.job]) or not stays(grant)]
        rank = {g.job: (not g.reserved, -by_id[g.job].spec.priority, not _parked(by_id[g.job])) for g in left}
        for grant in sorted(left, key=lambda g: rank[g.job]):
            if _parked(by_id[grant.job]) and stays(grant):
                continue
            mechanism = by_id[grant.job].spec.mechanism or mechanisms.DEFAULT
            places = self._choose(grant, mechanism, nodes, chooser, room)
            if places is None:
                plan.waiting[grant.job] = Reason.GPUS_FULL
            else:
                plan.assign[grant.job] = _assignment(grant, places)

    def _stay(
        self, grant: Grant, job: Job, nodes: tuple[NodeSpec, ...], chooser: GpuChooser, room: Room, plan: FleetPlan
    ) -> bool:
        """Let a job keep its GPUs, if the policy left it on its nodes; returns whether it does."""
        current = _current(job)
        if current is None:
            return False
        wanted = {nodes[n].name: g for n, g in zip(grant.nodes, grant.node_gpus, strict=True)}
        # a parked job can continue only on its present nodes, even if the policy has named equal ones
        if not (_parked(job) or dict(current.gpus_by_node()) == _rounded(wanted)) or not chooser.keep(current):
            return False
        kept = _assignment(grant, _kept(grant, nodes, current))
        if not room.take(kept):
            chooser.give_back([place.gpus for place in current.places])
            return False
        plan.assign[grant.job] = kept
        return True

    def _choose(
        self, grant: Grant, mechanism: str, nodes: tuple[NodeSpec, ...], chooser: GpuChooser, room: Room
    ) -> tuple[Place, ...] | None:
        """Choose the grant's GPUs on the nodes that it names; None unless all can be had. If the grant names a single
        node whose GPUs are not free (a parked job may hold them), take GPUs of another node with equal properties.
        """
        asked = [nodes[n] for n in grant.nodes]
        equal = ([n] for n in nodes if len(asked) == 1 and n is not asked[0] and _kind(n) == _kind(asked[0]))
        for way in itertools.chain([asked], equal):
            chosen = [chooser.choose(n.name, g, mechanism) for n, g in zip(way, grant.node_gpus, strict=True)]
            if all(gpus is not None for gpus in chosen):
                found = zip(way, chosen, grant.node_cpus, grant.node_memory, strict=True)
                places = tuple(Place(n.name, gpus or (), cpus, memory) for n, gpus, cpus, memory in found)
                if room.take(Assignment(places)):
                    return places
            chooser.give_back([gpus for gpus in chosen if gpus is not None])
        return None

    def _slice(self, job: Job, view: View, chooser: GpuChooser, plan: FleetPlan) -> None:
        """Assign an existing MIG instance to a job: the one that it holds, else the first free one. Called in order
        of arrival."""
        current = _current(job)
        if current is not None and chooser.keep(current):
            plan.assign[job.id] = current
            return
        assert job.spec.slice is not None
        for node in view.nodes:
            share = chooser.choose_instance(node.name, job.spec.slice)
            if share is not None:
                part = share.fraction / max(1, len(node.gpus))
                cpus = min(job.spec.cpus or math.inf, round(node.cpus * part, 3))
                memory = min(job.spec.memory_bytes or node.memory_bytes, int(node.memory_bytes * part))
                plan.assign[job.id] = Assignment((Place(node.name, (share,), cpus, memory),))
                return
        plan.waiting[job.id] = Reason.GPUS_FULL


def _current(job: Job) -> Assignment | None:
    """The assignment that a job holds. A parked job has the assignment that it held when it was parked, since it can
    continue only there."""
    return job.attempt.assignment if job.attempt is not None else None


def _parked(job: Job) -> bool:
    return job.attempt is not None and job.attempt.phase == PARKED


def _kind(node: NodeSpec) -> tuple[object, ...]:
    """The properties of a node that a policy sees. Nodes with equal properties are interchangeable."""
    gpus = node.plain_gpus
    return len(gpus), gpus[0].model, *node.plain_share()


def _kept(grant: Grant, nodes: Sequence[NodeSpec], current: Assignment) -> tuple[Place, ...]:
    """The places that a job keeps, with the grant's CPU and memory. If the policy has put a parked job on other nodes,
    it keeps its present CPU and memory."""
    names = [nodes[n].name for n in grant.nodes]
    given = dict(zip(names, zip(grant.node_cpus, grant.node_memory, strict=True), strict=True))
    if dict(current.gpus_by_node()) != _rounded(dict(zip(names, grant.node_gpus, strict=True))):
        return current.places
    return tuple(Place(p.node, p.gpus, *given[p.node]) for p in current.places)


def _assignment(grant: Grant, places: tuple[Place, ...]) -> Assignment:
    return Assignment(places, grant.level, grant.speed, grant.reserved)


def _rounded(wanted: dict[str, float]) -> dict[str, float]:
    return {node: round(gpus, 6) for node, gpus in wanted.items()}


def _grant(job: Job, nodes: Sequence[NodeSpec], names: dict[str, int]) -> Grant | None:
    """A running job's grant; None if its node or GPU is gone or the job is stopping."""
    attempt = job.attempt
    if attempt is None or attempt.phase in (PARKED, STOPPING) or any(node not in names for node in attempt.nodes):
        return None
    held, slot = attempt.assignment, -1
    for place in held.places:
        uuids = [gpu.uuid for gpu in nodes[names[place.node]].plain_gpus]
        if any(share.uuid not in uuids for share in place.gpus):
            return None
        if job.spec.gpus < 1:
            slot = uuids.index(place.gpus[0].uuid)
    by_node = held.gpus_by_node()
    return Grant(
        job.id,
        tuple(names[node] for node, _ in by_node),
        tuple(gpus for _, gpus in by_node),
        tuple(place.cpus for place in held.places),
        tuple(place.memory_bytes for place in held.places),
        held.level,
        held.speed,
        held.reserved,
        slot,
    )


def _held(job: str, held: Assignment, nodes: Sequence[NodeSpec], names: dict[str, int]) -> list[Grant]:
    """What a job keeps without being planned, as a grant for each node and for each part of a GPU. What is no more
    there, or belongs to MIG instances, is left out."""
    found = []
    for place in held.places:
        if place.node not in names:
            continue
        uuids = [gpu.uuid for gpu in nodes[names[place.node]].plain_gpus]
        shares = [share for share in place.gpus if share.instance is None and share.uuid in uuids]
        amounts = [(float(sum(share.fraction >= 1 for share in shares)), -1, place.cpus, place.memory_bytes)]
        amounts += [(s.fraction, uuids.index(s.uuid), 0.0, 0) for s in shares if s.fraction < 1]
        found += [
            Grant(job, (names[place.node],), (gpus,), (cpus,), (memory,), 0, 1.0, slot=slot)
            for gpus, slot, cpus, memory in (amounts if shares else [])
        ]
    return found


def reference_share(nodes: Sequence[NodeSpec]) -> tuple[float, float]:
    """Cores and GB per GPU of the first node with GPUs to assign: the demand of a job without a profile."""
    node = next(node for node in nodes if node.plain_gpus)
    (cpus, memory), gpus = node.plain_share(), len(node.plain_gpus)
    return cpus / gpus, memory / gpus / 1e9


def _cluster(nodes: tuple[NodeSpec, ...]) -> Cluster:
    """The nodes as a Cluster for policies; consecutive equal nodes form one group."""
    groups: list[NodeGroup] = []
    for node in nodes:
        gpus = node.plain_gpus
        gpu = _catalogued(gpus[0].model, gpus[0].memory_bytes)
        group = NodeGroup(1, len(gpus), gpu, *node.plain_share())
        if groups and dataclasses.replace(groups[-1], count=1) == group:
            groups[-1] = dataclasses.replace(group, count=groups[-1].count + 1)
        else:
            groups.append(group)
    return Cluster(tuple(groups), "fleet")


def cluster_of(nodes: Iterable[NodeSpec]) -> Cluster:
    """The nodes that have GPUs, as a Cluster; InputError if there are none."""
    return _cluster(tuple(node for node in nodes if node.plain_gpus))


def _catalogued(model: str, memory_bytes: int) -> Gpu:
    try:
        return find_gpu(model)
    except InputError:  # a model that the catalog does not have gets the relative speed 1
        return Gpu(model, 1, memory_bytes, 1555, 312)


def jobs_of(jobs: Sequence[Job], profiles: ProfileBook) -> Jobs:
    """The jobs as arrays. A job without duration and iterations counts as profiles.UNKNOWN_LENGTH_S long."""
    specs = [job.spec for job in jobs]
    nan = float("nan")
    length = [profiles.length(spec) for spec in specs]
    return Jobs.build(
        len(jobs),
        id=np.array([job.id for job in jobs], dtype=object),
        arrival_s=[job.arrival_s for job in jobs],
        gpus=[spec.gpus for spec in specs],
        duration_s=[duration_s for duration_s, _ in length],
        iterations=[iterations for _, iterations in length],
        model=np.array([profiles.key_or_plain(spec) for spec in specs], dtype=object),
        tenant=np.array([spec.tenant for spec in specs], dtype=object),
        priority=[spec.priority for spec in specs],
        cpus=[nan if spec.cpus is None else spec.cpus for spec in specs],
        memory_bytes=[nan if spec.memory_bytes is None else float(spec.memory_bytes) for spec in specs],
        deadline_s=[nan if spec.deadline_s is None else spec.deadline_s for spec in specs],
    )
