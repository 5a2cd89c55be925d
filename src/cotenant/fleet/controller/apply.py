"""Turns plans into orders to nodes: which jobs' processes stop, are resized or parked (stay alive while their memory is
off the GPU), and which jobs start when their GPUs are free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cotenant.core.events import Kind, Reason
from cotenant.fleet.controller.gpuchoice import GpuChooser, Room
from cotenant.fleet.controller.job_table import JobTable, ask_stop, holds_gpus
from cotenant.fleet.controller.leases import Leases
from cotenant.fleet.controller.planners import FleetPlan
from cotenant.fleet.executors.base import job_folder
from cotenant.fleet.nodes import NodeSpec
from cotenant.fleet.state import PARKED, RUNNING, STARTING, STOPPING, UP, Assignment, Attempt, Job, Place
from cotenant.training.contract import BATCH_ENV

MOST_STARTS = 64  # largest number of jobs started in one step; starting hundreds at once would delay everything else


class Applier:
    """Applies plans as far as GPUs are free; jobs that must wait keep their target (the assignment that the plan gives
    them) until the next plan.
    """

    def __init__(self, table: JobTable, grace_s: float, folder: Path, parks: Mapping[str, bool]) -> None:
        self.table, self.grace_s, self.folder, self.parks = table, grace_s, folder, parks

    # -- a new plan ------------------------------------------------------------------------------------------------

    def plan(self, plan: FleetPlan, jobs: Iterable[Job], now_s: float, *, early: bool) -> None:
        """Give each of `jobs` its target, the assignment that the plan has for it. An early plan, one between two
        rounds, only starts jobs, and lets parked ones go on.
        """
        for job in jobs:
            target = plan.assign.get(job.id)
            reason = int(plan.reasons.get(job.id, Reason.IN_ORDER))
            if job.attempt is None:
                if early and job.target is not None:
                    continue
                job.target = target
                if target is not None:
                    job.target_reason = reason
                elif job.told == -1 and job.id in plan.waiting:
                    job.told = int(plan.waiting[job.id])
                    self.table.tell(now_s, job, Kind.WAIT, job.told)
                    self.table.touch(job)
            elif not early:
                self._attempt(job, job.attempt, target, plan, now_s)
            elif target is not None and job.target is None and resumes(job, target):
                job.target, job.target_reason = target, reason

    def _attempt(self, job: Job, attempt: Attempt, target: Assignment | None, plan: FleetPlan, now_s: float) -> None:
        """Apply the plan to a job that has processes: stop, resize or park it, or leave it as it is."""
        job.target = None
        if attempt.phase == STOPPING:
            job.target = target
        elif target is None:
            why = plan.waiting.get(job.id, Reason.OUTRANKED)
            self._leave(job, attempt, now_s, Reason.OUTRANKED if why == Reason.GPUS_FULL else why)
        elif not target.same_gpus(attempt.assignment):
            job.target = target
            reason = int(plan.reasons.get(job.id, Reason.REPLACED))
            ask_stop(self.table, job, "move", now_s, job.grace_s(self.grace_s), reason)
        elif attempt.phase == PARKED:
            job.target = target  # a parked job resumes on the GPUs of its target when they are free
        elif _amounts(target) != _amounts(attempt.assignment):
            self._resize(job, attempt, target, now_s)

    def _leave(self, job: Job, attempt: Attempt, now_s: float, reason: Reason) -> None:
        """Preempt a job. If the job cannot save its own state and the GPU's agent can park it (move its memory off the
        GPU), it is parked; otherwise it is stopped gracefully."""
        if attempt.phase == PARKED:
            return
        can = attempt.phase == UP and attempt.progress is None and all(self.parks.get(n) for n in attempt.nodes)
        if not can:
            ask_stop(self.table, job, "preempt", now_s, job.grace_s(self.grace_s), int(reason))
            return
        # the job keeps its GPUs until the agent has evicted its memory
        attempt.phase, attempt.stop_why, attempt.stop_s = STOPPING, "park", now_s
        job.target_reason = int(reason)
        self.table.touch(job)
        for node in attempt.nodes:
            self.table.orders[node].append({"do": "park", "attempt": job.attempt_id()})

    def _resize(self, job: Job, attempt: Attempt, target: Assignment, now_s: float) -> None:
        """Change the CPU cores and the host memory of a running job. It keeps its GPUs and is not restarted."""
        from cotenant.policy.jobs.arrays import IDEAL

        attempt.assignment = target
        reason = Reason.GOT_IDEAL if target.level == IDEAL else Reason.GAVE_WAY
        if attempt.started_s is not None:
            self.table.tell(now_s, job, Kind.RESIZE, int(reason), target)
        self.table.touch(job)
        for place in target.places:
            order = {"do": "resize", "attempt": job.attempt_id(), "cpus": place.cpus,
                     "memory_bytes": place.memory_bytes}  # fmt: skip
            self.table.orders[place.node].append(order)

    # -- starts ----------------------------------------------------------------------------------------------------

    def start_ready(self, nodes: Mapping[str, NodeSpec], clocks_ns: Mapping[str, int], leases: Leases,
                    now_s: float, port_of: Any) -> None:  # fmt: skip
        """Start (or resume) every job whose target's GPUs, CPU and memory are free."""
        wanting = [job for job in self.table.jobs.values() if job.target is not None]
        if not wanting:
            return
        room = _Free(nodes, self.table.running())
        begun_now = 0
        for job in wanting:
            target, attempt = job.target, job.attempt
            if begun_now >= MOST_STARTS:
                break
            if target is None or (attempt is not None and attempt.phase != PARKED):
                continue
            if any(p.node not in nodes or p.node not in clocks_ns for p in target.places):
                continue
            if not room.take(target):
                continue
            begun_now += 1
            if attempt is not None:
                self._unpark(job, attempt, target, now_s)
            else:
                gang = _processes(job, target) > 1
                port = port_of(target.places[0].node) if gang else 0
                if gang and not port:
                    # The job is not started now, because its first node does not answer. The ranks find each other
                    # through a port of that node.
                    continue
                self._start(job, target, nodes, clocks_ns, leases, now_s, port)

    def _unpark(self, job: Job, attempt: Attempt, target: Assignment, now_s: float) -> None:
        attempt.phase, attempt.assignment, attempt.counted_s = UP, target, now_s
        attempt.off, attempt.off_on = False, set()
        job.target, job.told = None, -1
        self.table.tell(now_s, job, Kind.RESUME, job.target_reason, target)
        self.table.touch(job)
        for node in attempt.nodes:
            self.table.orders[node].append({"do": "resume", "attempt": job.attempt_id()})

    def _start(self, job: Job, target: Assignment, nodes: Mapping[str, NodeSpec], clocks_ns: Mapping[str, int],
               leases: Leases, now_s: float, port: int) -> None:  # fmt: skip
        attempt = Attempt(job.n, target, STARTING, created_s=now_s, port=port)
        job.attempt, job.n, job.state, job.target = attempt, attempt.n + 1, RUNNING, None
        self.table.touch(job)
        world, first = _processes(job, target), 0
        address = nodes[target.places[0].node].address
        for index, place in enumerate(target.places):
            ranks = _ranks(job, place)
            order = {
                "do": "start",
                "attempt": job.attempt_id(),
                "job": job.id,
                "n": attempt.n,
                "command": list(job.spec.command),
                "environment": dict(job.spec.env),
                "workdir": job.spec.workdir or "/",
                "job_dir": job.spec.job_dir or str(job_folder(self.folder, job.id)),
                "gpus": [{"uuid": g.uuid, "fraction": g.fraction, "mechanism": g.mechanism, "instance": g.instance,
                          "slice": g.slice, "limit": g.limit} for g in place.gpus],
                "cpus": place.cpus,
                "memory_bytes": place.memory_bytes,
                "until_ns": clocks_ns[place.node] + round(leases.keep_s * 1e9),
                "grace_s": job.grace_s(self.grace_s),
                "ranks": [
                    {
                        "rank": first + k,
                        "log": log_path(self.folder, job, attempt.n, first + k),
                        "environment": _rank_environment(first + k, k, world, ranks, index, target, address, port),
                    }
                    for k in range(ranks)
                ],
            }  # fmt: skip
            first += ranks
            leases.granted(place.node, now_s)
            self.table.orders[place.node].append(order)


def resumes(job: Job, target: Assignment) -> bool:
    """Whether a job is parked, and may go on where it is by a plan that gives it `target`."""
    return job.attempt is not None and job.attempt.phase == PARKED and target.same_gpus(job.attempt.assignment)


class _Free:
    """Free GPUs, CPU cores and memory of the nodes while jobs are started. `take` subtracts what a job gets."""

    def __init__(self, nodes: Mapping[str, NodeSpec], running: list[Job]) -> None:
        held = [job.attempt.assignment for job in running if job.attempt is not None and holds_gpus(job.attempt)]
        self.gpus, self.room = GpuChooser(nodes.values()), Room(nodes.values(), held)
        for assignment in held:
            self.gpus.hold(assignment)

    def take(self, target: Assignment) -> bool:
        """Take all resources of a job's target from the free ones and return True, or take none and return False."""
        if not self.gpus.keep(target):
            return False
        if not self.room.take(target):
            self.gpus.give_back([place.gpus for place in target.places])
            return False
        return True


def _amounts(assignment: Assignment) -> list[tuple[str, float, int]]:
    return sorted((p.node, p.cpus, p.memory_bytes) for p in assignment.places)


def _ranks(job: Job, place: Place) -> int:
    """Return the number of processes of a job on a node."""
    return 1 if job.spec.processes == "node" or job.spec.shared else max(1, len(place.gpus))


def _processes(job: Job, target: Assignment) -> int:
    return sum(_ranks(job, place) for place in target.places)


def _rank_environment(
    rank: int, local: int, world: int, here: int, node: int, target: Assignment, address: str, port: int
) -> dict[str, str]:
    """Environment of a rank: the variables that torchrun sets, without those for a rendezvous if the job has one
    process, and the batch size if a policy chose one."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(here)}
    if target.batch:
        own[BATCH_ENV] = str(target.batch)
    if world > 1:
        own |= {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "NODE_RANK": str(node),
            "GROUP_RANK": str(node),
            "NNODES": str(len(target.places)),
            "OMP_NUM_THREADS": str(max(1, math.floor(target.places[node].cpus / here))),
        }
    return own


def log_path(folder: Path, job: Job, n: int, rank: int) -> str:
    """Return the path of the file with the output of a rank."""
    own = Path(job.spec.job_dir) if job.spec.job_dir else job_folder(folder, job.id)
    return str(own / f"log-{n}-{rank}.txt")
