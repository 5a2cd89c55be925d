"""One decision of a job policy, in compiled code: gives GPUs to jobs in their order.

The simulator and the live controller call the same `decide`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cotenant.core.events import Reason
from cotenant.policy.compiled import bare, inlined, inner
from cotenant.policy.jobs.allotment import A_ELASTIC, A_OPTIMAL, A_TUNE, allot, relevel
from cotenant.policy.jobs.arrays import ENTRY, IDEAL, NONE, NOT_RUNNING, Allocation, Array, Demand
from cotenant.policy.jobs.ordering import HELD_PRIORITY, RESERVED_PRIORITY, Context, order_jobs
from cotenant.policy.jobs.placement import clear, join, retake

# compiled code cannot use members of an enum, so plain integers hold their values
GPUS_FULL = int(Reason.GPUS_FULL)
GANG_TOO_LARGE = int(Reason.GANG_TOO_LARGE_NOW)
NO_CPU_OR_MEMORY = int(Reason.NO_CPU_OR_MEMORY)
NO_GPU_OF_MODEL = int(Reason.NO_GPU_OF_MODEL)
NOT_CHOSEN = int(Reason.NOT_CHOSEN)


class Choice(NamedTuple):
    """The codes of a job policy (see ordering, allotment and placement), and its options."""

    ordering: int
    allotment: int
    placement: int
    sticky: bool  # whether running jobs that continue keep their GPUs
    # whether Python code must run before a decision: it chooses the levels of the optimal allotment, or everything
    # under an elastic policy
    asks: bool


class Scratch(NamedTuple):
    """Working arrays of `decide`, allocated once for all decisions."""

    servers: Array  #: i8[N]
    shares: Array  #: i8[N]
    failed: Array  # bool[T]: whether, in this round, no place was found for a job of the type
    kept: Array  #: ENTRY[E]
    selected: Array  #: i8[J]
    # i8[J]: the other job if this one is the second job on a GPU, -1 if it is not; used by elastic policies
    host: Array


def make_scratch(alloc: Allocation) -> Scratch:
    """Create the working arrays for decisions on an allocation."""
    n, entries = len(alloc.node), len(alloc.entry)
    return Scratch(
        servers=np.zeros(n, np.int64),
        shares=np.zeros(n, np.int64),
        failed=np.zeros(alloc.pointer.shape[1], np.bool_),
        kept=np.zeros(entries, ENTRY),
        selected=np.zeros(len(alloc.job), np.int64),
        host=np.full(len(alloc.job), NONE),
    )


@inlined
def _enough_gpus(alloc: Allocation, demand: Demand, typ: int) -> int:
    """Return 0 if the free GPUs of models that the type accepts could hold all GPUs of one job of the type; otherwise
    the reason why they cannot (core.events.Reason).
    """
    if demand.type[typ].part_milli > 0:
        return 0  # a fraction of a GPU may fit on a GPU that fractions already use
    g = demand.type[typ].gpus
    if alloc.used[1] < g:
        return GPUS_FULL if alloc.used[1] == 0 else GANG_TOO_LARGE
    usable = 0
    for kind in range(len(alloc.free_kind)):
        if demand.allowed[typ, kind]:
            usable += alloc.free_kind[kind]
    return 0 if usable >= g else NO_GPU_OF_MODEL


@bare
def gang_prefix(order: Any, n: int, jobs: Any, demand: Demand, gpus: int, selected: Any) -> int:
    """Select, in the given order, the jobs whose GPUs fit into the cluster by number of GPUs alone, skipping those that
    do not. Returns the number of selected jobs.
    """
    milli = gpus * 1000
    found = 0
    for i in range(n):
        job = order[i]
        typ = jobs[job].type
        wants = demand.type[typ].part_milli if demand.type[typ].part_milli > 0 else demand.type[typ].gpus * 1000
        if wants <= milli:
            milli -= wants
            selected[found] = job
            found += 1
            if milli == 0:
                break
    return found


@inner
def _keep(
    alloc: Allocation, demand: Demand, nodes: Array, jobs: Any, order: Any, n: int, scratch: Scratch, chosen: Any,
    count: int,
) -> None:  # fmt: skip
    """Free all GPUs. Then give each of the jobs chosen[:count] that ran before exactly the GPUs that it had."""
    if count > 0:
        for e in range(alloc.used[0]):
            scratch.kept[e] = alloc.entry[e]
    clear(alloc, nodes)
    for i in range(count):
        job = chosen[i]
        level = alloc.job[job].level
        if level == NOT_RUNNING:
            continue
        begin, entries = alloc.job[job].first, alloc.job[job].count
        alloc.job[job].first = alloc.used[0]
        alloc.job[job].count = 0
        for e in range(begin, begin + entries):
            had = scratch.kept[e]
            retake(alloc, demand, nodes, job, jobs[job].type, level, had.node, had.gpus, had.slot)
        jobs[job].reason = -1  # marks a job that keeps its GPUs, until all jobs are placed
    for i in range(n):
        job = order[i]
        if jobs[job].reason != -1:
            alloc.job[job].level = NOT_RUNNING
            alloc.job[job].count = 0


@inner
def _keep_running(
    alloc: Allocation, demand: Demand, nodes: Array, jobs: Any, order: Any, n: int, scratch: Scratch
) -> int:
    """Select jobs in their order, by `gang_prefix`, and let the selected jobs that run keep their GPUs. Returns how
    many jobs are selected.
    """
    total = 0
    for i in range(len(nodes)):
        total += nodes[i].gpus
    selected = gang_prefix(order, n, jobs, demand, total, scratch.selected)
    _keep(alloc, demand, nodes, jobs, order, n, scratch, scratch.selected, selected)
    return int(selected)


@inner
def _keep_reserved(
    alloc: Allocation, demand: Demand, nodes: Array, jobs: Any, order: Any, n: int, scratch: Scratch
) -> None:
    """Call `_keep` for the jobs that run by a reservation, which are the first in the order, so that they keep their
    GPUs.
    """
    held = 0
    while held < n and jobs[order[held]].rank == HELD_PRIORITY:
        held += 1
    _keep(alloc, demand, nodes, jobs, order, n, scratch, order, held)


@inner
def _reserved_waits(alloc: Allocation, jobs: Any, selected: Any, count: int) -> bool:
    """Whether a job with a reservation did not fit although enough GPUs are free in total."""
    for i in range(count):
        job = selected[i]
        if jobs[job].rank < RESERVED_PRIORITY:
            return False
        if alloc.job[job].level == NOT_RUNNING:
            return True
    return False


@inner
def _chosen_waits(alloc: Allocation, jobs: Any, order: Any, n: int) -> bool:
    """Whether a job that an elastic policy chose did not fit, because the kept jobs occupy the wrong nodes."""
    waits = False
    for i in range(n):
        waits = waits or (jobs[order[i]].wanted != NOT_RUNNING and alloc.job[order[i]].level == NOT_RUNNING)
    return waits


@inner
def _walk(
    order: Any, n: int, jobs: Any, alloc: Allocation, demand: Demand, nodes: Array, choice: Choice,
    scratch: Scratch,
) -> int:  # fmt: skip
    """Place the jobs that do not run yet, in their order. Returns how many jobs run afterwards."""
    scratch.failed[:] = False
    running = 0
    for i in range(n):
        job = order[i]
        typ = jobs[job].type
        if alloc.job[job].level != NOT_RUNNING:
            if choice.allotment == A_TUNE:
                relevel(alloc, demand, nodes, job, typ, IDEAL)
            elif choice.allotment >= A_OPTIMAL:
                relevel(alloc, demand, nodes, job, typ, jobs[job].wanted)
            jobs[job].reason = 0
            running += 1
            continue
        if choice.allotment == A_ELASTIC and jobs[job].wanted == NOT_RUNNING:
            jobs[job].reason = NOT_CHOSEN
            continue
        if choice.allotment == A_ELASTIC and scratch.host[job] != NONE:
            jobs[job].reason = NOT_CHOSEN
            if join(alloc, demand, nodes, job, typ, jobs[job].wanted, scratch.host[job]):
                jobs[job].reason = 0
                running += 1
            continue
        why = _enough_gpus(alloc, demand, typ)
        if why != 0:
            jobs[job].reason = why
            continue
        if scratch.failed[typ]:
            jobs[job].reason = NO_CPU_OR_MEMORY
            continue
        if allot(
            alloc, demand, nodes, jobs, choice.allotment, choice.placement, job, scratch.servers, scratch.shares
        ):  # fmt: skip
            jobs[job].reason = 0
            running += 1
        else:
            jobs[job].reason = GPUS_FULL if alloc.used[1] == 0 else NO_CPU_OR_MEMORY
            scratch.failed[typ] = True
    return running


@inner
def _place(
    order: Any, n: int, jobs: Any, alloc: Allocation, demand: Demand, nodes: Array, choice: Choice,
    scratch: Scratch,
) -> int:  # fmt: skip
    """Place the jobs order[:n] on the cluster. Returns how many jobs run."""
    if choice.sticky:
        selected = _keep_running(alloc, demand, nodes, jobs, order, n, scratch)
        running = _walk(order, n, jobs, alloc, demand, nodes, choice, scratch)
        # jobs that keep their GPUs may occupy the only ones that a job with a reservation can use, and would never free
        # them
        again = _reserved_waits(alloc, jobs, scratch.selected, selected)
        if choice.allotment == A_ELASTIC:
            again = _chosen_waits(alloc, jobs, order, n)
        if not again:
            return running
    _keep_reserved(alloc, demand, nodes, jobs, order, n, scratch)
    return int(_walk(order, n, jobs, alloc, demand, nodes, choice, scratch))


@inner
def decide(
    order: Any, n: int, jobs: Any, alloc: Allocation, demand: Demand, nodes: Array, choice: Choice,
    scratch: Scratch,
) -> int:  # fmt: skip
    """Decide where the jobs order[:n] run in the next round. Returns the number of jobs that run.

    Reads the last allocation of jobs that run by a reservation, and of all jobs if the choice is sticky. Afterwards
    alloc.job[job].level is set for jobs that run, jobs[job].reason for those that do not, and jobs[job].reserved for
    those that run by a reservation. `jobs[job].wanted`: level that the optimal allotment has chosen.
    """
    running = _place(order, n, jobs, alloc, demand, nodes, choice, scratch)
    for i in range(n):
        job = order[i]
        if jobs[job].rank < RESERVED_PRIORITY:
            break
        jobs[job].reserved = alloc.job[job].level != NOT_RUNNING
    return int(running)


# The two steps of a decision, for callers in Python, which may set the levels of the optimal allotment between them.


@bare
def order_at(
    code: int, now: float, order: Any, n: int, jobs: Array, demand: Demand, context: Context, scratch: Any
) -> None:
    """Sort the jobs as `ordering.order_jobs` does, but callable from Python."""
    order_jobs(code, now, order, n, jobs, demand, context, scratch)


@bare
def decide_ordered(
    order: Any, n: int, jobs: Array, alloc: Allocation, demand: Demand, nodes: Array, choice: Choice, scratch: Scratch
) -> int:
    """Decide as `decide` does, but callable from Python, for jobs that are already ordered."""
    return int(decide(order, n, jobs, alloc, demand, nodes, choice, scratch))
