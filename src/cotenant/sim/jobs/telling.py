"""Writes the training simulator's events and rounds into buffers. Compiled.

Events come from comparing a decision with the previous one: which jobs started, stopped, moved, or got other CPU and
memory.
"""

from __future__ import annotations

import numpy as np

from cotenant.core.events import Kind, Reason
from cotenant.policy.compiled import inlined, inner
from cotenant.policy.jobs.allotment import A_ELASTIC
from cotenant.policy.jobs.arrays import IDEAL, NOT_RUNNING, Allocation, Array
from cotenant.policy.jobs.ordering import RESERVED_PRIORITY
from cotenant.sim.jobs.state import C_ACTIVE, C_EMIT, C_EVENTS, C_NODES, C_ROUNDS, C_RUNNING, C_SAME, World

# numpy scalars, because numba would compile a copy of a function for each plain number (see policy.jobs.arrays)
ARRIVE, START, RESUME, MOVE, RESIZE, PREEMPT, FINISH, WAIT = (np.int64(k) for k in list(Kind)[:8])
(R_NONE, R_GPUS_FULL, R_IN_ORDER, R_RESERVED, R_GAVE_WAY, R_GOT_IDEAL, R_REPLACED, R_OUTRANKED, R_DONE,
 R_OTHER_SPEED) = (
    np.int64(r)
    for r in (
        Reason.NONE, Reason.GPUS_FULL, Reason.IN_ORDER, Reason.RESERVED, Reason.GAVE_WAY, Reason.GOT_IDEAL,
        Reason.REPLACED, Reason.OUTRANKED, Reason.DONE, Reason.OTHER_SPEED,
    )
)  # fmt: skip
HOLDS, HOLDS_NOT, ZERO = np.bool_(True), np.bool_(False), np.int64(0)


@inlined
def gpus_of(w: World, job: int) -> float:
    part = w.demand.type[w.jobs[job].type].part_milli
    return part / 1000.0 if part > 0 else float(w.demand.type[w.jobs[job].type].gpus)


@inner
def tell(w: World, time_s: float, job: int, kind: int, reason: int, held: bool) -> None:
    """Write one event of a job into the buffers. `held`: the job has its allocation from now on, so the event describes
    the allocation.
    """
    c, out, alloc = w.run.counters, w.out, w.alloc
    e = c[C_EVENTS]
    cpu, memory, speed = 0, 0, 0.0
    n = c[C_NODES]
    if held:
        typ, level = w.jobs[job].type, alloc.job[job].level
        for i in range(alloc.job[job].first, alloc.job[job].first + alloc.job[job].count):
            node = alloc.entry[i].node
            cpu += w.demand.amount[level, typ, w.nodes[node].kind].cpu * alloc.entry[i].gpus
            memory += w.demand.amount[level, typ, w.nodes[node].kind].memory * alloc.entry[i].gpus
            if w.options.record_moves:
                part = w.demand.type[typ].part_milli
                out.node[n].node = node
                out.node[n].gpus = part / 1000.0 if part > 0 else alloc.entry[i].gpus
                n += 1
        speed = w.demand.type[typ].isolated_s / w.run.job[job].iteration_s
    out.event[e].time_s = time_s
    out.event[e].job = job
    out.event[e].kind = kind
    out.event[e].reason = reason
    out.event[e].cpu_milli = cpu
    out.event[e].memory_mb = memory
    out.event[e].speed = speed
    out.event[e].node_end = n
    c[C_NODES] = n
    c[C_EVENTS] = e + 1


@inlined
def no_room(w: World, nodes: int) -> bool:
    c = w.run.counters
    return (
        c[C_EVENTS] + 1 >= len(w.out.event)
        or c[C_NODES] + nodes >= len(w.out.node)
        or c[C_ROUNDS] + 1 >= len(w.out.round)
    )


@inner
def remember(w: World) -> None:
    """Store the policy's last decision, with which the next one is compared."""
    alloc, c, progress = w.alloc, w.run.counters, w.run.job
    if w.options.moves_matter:
        for i in range(alloc.used[0]):
            w.run.old_entry[i] = alloc.entry[i]
    for i in range(c[C_ACTIVE]):
        job = w.run.order[i]
        progress[job].old_first = alloc.job[job].first
        progress[job].old_count = alloc.job[job].count
        progress[job].old_level = alloc.job[job].level


@inlined
def _pace(w: World, job: int) -> float:
    """Return the seconds per iteration with the job's present allocation. The slowest node determines the speed of a
    job on several nodes.
    """
    alloc = w.alloc
    typ, level = w.jobs[job].type, alloc.job[job].level
    slowest = 0.0
    for i in range(alloc.job[job].first, alloc.job[job].first + alloc.job[job].count):
        slowest = max(slowest, w.demand.amount[level, typ, w.nodes[alloc.entry[i].node].kind].iteration_s)
    if alloc.job[job].count > 1:
        slowest /= w.demand.type[typ].multi_node_factor
    return slowest


@inlined
def _moved(alloc: Allocation, progress: Array, old_entry: Array, job: int) -> bool:
    """Whether a running job has other GPUs than after the previous decision; the order of the job's nodes is ignored.
    """
    count = alloc.job[job].count
    moved = count != progress[job].old_count
    if not moved:
        a, b = alloc.job[job].first, progress[job].old_first
        for i in range(count):
            node, gpus = alloc.entry[a + i].node, alloc.entry[a + i].gpus
            found = node == old_entry[b + i].node and gpus == old_entry[b + i].gpus
            for k in range(0 if found else count):
                found = found or (node == old_entry[b + k].node and gpus == old_entry[b + k].gpus)
            moved = moved or not found
    return moved


@inner
def _gets_other(w: World, job: int, old: int) -> bool:
    """Whether a job gets other CPU or memory than before on the same GPUs. Different levels may have the same
    amounts."""
    alloc, typ, level = w.alloc, w.jobs[job].type, w.alloc.job[job].level
    for e in range(alloc.job[job].first, alloc.job[job].first + alloc.job[job].count):
        kind = w.nodes[alloc.entry[e].node].kind
        has, had = w.demand.amount[level, typ, kind], w.demand.amount[old, typ, kind]
        if has.cpu != had.cpu or has.memory != had.memory:
            return True
    return False


@inner
def _tell_running(w: World, now: float, job: int, moved: bool) -> None:
    """Write an event if a job started, moved, or got other CPU and memory."""
    progress, level = w.run.job, w.alloc.job[job].level
    old = progress[job].old_level
    progress[job].iteration_s = _pace(w, job)
    if progress[job].started and (moved or old == NOT_RUNNING):
        progress[job].debt_s += progress[job].resume_s
    if old == NOT_RUNNING:
        reason = R_RESERVED if w.jobs[job].rank == RESERVED_PRIORITY else R_IN_ORDER
        tell(w, now, job, RESUME if progress[job].started else START, reason, HOLDS)
        progress[job].started = True
        progress[job].told_waiting = False
    elif moved and w.options.record_moves:
        tell(w, now, job, MOVE, R_REPLACED, HOLDS)
    elif w.choice.allotment == A_ELASTIC:
        tell(w, now, job, RESIZE, R_OTHER_SPEED, HOLDS)
    elif _gets_other(w, job, old):
        tell(w, now, job, RESIZE, R_GAVE_WAY if level != IDEAL else R_GOT_IDEAL, HOLDS)


@inner
def _tell_waiting(w: World, now: float, job: int) -> None:
    """Write an event if a job lost its allocation, or did not get one."""
    progress, why = w.run.job, w.jobs[job].reason
    if progress[job].old_level != NOT_RUNNING:
        tell(w, now, job, PREEMPT, R_OUTRANKED if why == R_GPUS_FULL else why, HOLDS_NOT)
    else:
        tell(w, now, job, WAIT, why, HOLDS_NOT)
    progress[job].told_waiting = True


@inner
def tell_changes(w: World, now: float) -> bool:
    """Write the events that follow from the policy's decision. False: the buffers are full."""
    run, alloc, c, progress = w.run, w.alloc, w.run.counters, w.run.job
    compare = w.options.moves_matter
    for i in range(c[C_EMIT], c[C_ACTIVE]):
        job = run.order[i]
        level = alloc.job[job].level
        if level != NOT_RUNNING:
            moved = compare and _moved(alloc, progress, run.old_entry, job)
            changed = moved or level != progress[job].old_level
        else:
            moved = False
            changed = not progress[job].told_waiting
        if not changed:
            continue
        if no_room(w, alloc.job[job].count):
            c[C_EMIT] = i
            return False
        if level != NOT_RUNNING:
            _tell_running(w, now, job, moved)
        else:
            _tell_waiting(w, now, job)
    c[C_EMIT] = 0
    return True


@inner
def tell_round(w: World, now: float) -> None:
    c, out, alloc, nodes = w.run.counters, w.out, w.alloc, w.nodes
    r = c[C_ROUNDS]
    if c[C_SAME] and r > 0:
        out.round[r] = out.round[r - 1]
        out.round[r].time_s = now
        c[C_ROUNDS] = r + 1
        return
    cpu, memory, whole, held = 0, 0, 0, 0.0
    for node in range(len(nodes)):
        cpu += nodes[node].cpu - alloc.node[node].free_cpu
        memory += nodes[node].memory - alloc.node[node].free_memory
        if alloc.node[node].free_gpus == nodes[node].gpus:
            whole += nodes[node].gpus
        held += nodes[node].gpus - alloc.node[node].free_gpus
        for s in range(alloc.slots.shape[1]):
            if alloc.slots[node, s] > 0:
                held -= alloc.slots[node, s] / 1000.0
    out.round[r].time_s = now
    out.round[r].running = c[C_RUNNING]
    out.round[r].waiting = c[C_ACTIVE] - c[C_RUNNING]
    out.round[r].cpu_milli_held = cpu
    out.round[r].memory_mb_held = memory
    out.round[r].gpus_held = held
    out.round[r].gpus_wanted = w.run.wanted_gpus[0]
    out.round[r].gpus_free_whole_nodes = whole
    c[C_ROUNDS] = r + 1
