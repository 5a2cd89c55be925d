"""The event loop of the training simulator, compiled. It runs until its buffers are full or a decision needs Python.

A tick is the start of a lease. What happens at one: jobs that ended and arrived since the last are told, the rest is
ordered, the policy decides, changes are told, and the lease is served at once, since nothing can change before its end.
"""

from __future__ import annotations

import math

import numpy as np

from cotenant.model.events import Kind, Reason
from cotenant.policy.allotment import A_OPTIMAL
from cotenant.policy.arrays import IDEAL, NOT_RUNNING, Allocation, Array
from cotenant.policy.compiled import bare, inlined, inner
from cotenant.policy.ordering import FTF, FTF_PUBLIC, RESERVED_PRIORITY, order_jobs
from cotenant.policy.rounds import decide
from cotenant.sim.state import (
    C_ACTIVE,
    C_DECISIONS,
    C_EMIT,
    C_EVENTS,
    C_FINISHED,
    C_FRESH,
    C_IDLE,
    C_NEXT,
    C_NODES,
    C_PHASE,
    C_ROUNDS,
    C_RUNNING,
    C_SAME,
    C_STALLED,
    C_TICK,
    C_TOLD,
    Options,
    World,
)  # fmt: skip

# why `advance` came back
DONE, FLUSH, NEED_LEVELS, NOWHERE = 0, 1, 2, 3
# where to go on
P_TICK, P_DECIDE, P_TELL, P_SERVE = 0, 1, 2, 3

# plain numbers would be compiled in, a copy of the function for each (see policy.arrays)
ARRIVE, START, RESUME, MOVE, RESIZE, PREEMPT, FINISH, WAIT = (np.int64(k) for k in list(Kind)[:8])
R_NONE, R_GPUS_FULL, R_IN_ORDER, R_RESERVED, R_GAVE_WAY, R_GOT_IDEAL, R_REPLACED, R_OUTRANKED, R_DONE = (
    np.int64(r)
    for r in (
        Reason.NONE, Reason.GPUS_FULL, Reason.IN_ORDER, Reason.RESERVED, Reason.GAVE_WAY, Reason.GOT_IDEAL,
        Reason.REPLACED, Reason.OUTRANKED, Reason.DONE,
    )
)  # fmt: skip
HOLDS, HOLDS_NOT, ZERO = np.bool_(True), np.bool_(False), np.int64(0)


@inlined
def _gpus_of(w: World, job: int) -> float:
    part = w.demand.type[w.jobs[job].type].part_milli
    return part / 1000.0 if part > 0 else float(w.demand.type[w.jobs[job].type].gpus)


@inner
def _tell(w: World, time_s: float, job: int, kind: int, reason: int, held: bool) -> None:
    """Write one event; `held`: with what the job holds from now on."""
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
def _no_room(w: World, nodes: int) -> bool:
    c = w.run.counters
    return (
        c[C_EVENTS] + 1 >= len(w.out.event)
        or c[C_NODES] + nodes >= len(w.out.node)
        or c[C_ROUNDS] + 1 >= len(w.out.round)
    )


@inner
def _admit(w: World, now: float) -> bool:
    """Tell ends and arrivals up to now, in time order; False when the buffers are full."""
    run, c = w.run, w.run.counters
    while True:
        if _no_room(w, ZERO):
            return False
        has_end = c[C_TOLD] < c[C_FINISHED]
        has_arrival = c[C_NEXT] < len(w.jobs) and w.jobs[c[C_NEXT]].arrival_s <= now
        if not has_end and not has_arrival:
            break
        if has_end and (not has_arrival or w.run.job[run.ended[c[C_TOLD]]].finish_s <= w.jobs[c[C_NEXT]].arrival_s):
            job = run.ended[c[C_TOLD]]
            _tell(w, w.run.job[job].finish_s, job, FINISH, R_DONE, HOLDS_NOT)
            run.wanted_gpus[0] -= _gpus_of(w, job)
            c[C_TOLD] += 1
        else:
            job = c[C_NEXT]
            _tell(w, w.jobs[job].arrival_s, job, ARRIVE, R_NONE, HOLDS_NOT)
            run.wanted_gpus[0] += _gpus_of(w, job)
            run.order[c[C_ACTIVE]] = job
            w.jobs[job].dirty = True
            c[C_ACTIVE] += 1
            c[C_NEXT] += 1
            c[C_FRESH] += 1
    if c[C_FINISHED] > 0:
        kept = 0
        for i in range(c[C_ACTIVE]):
            job = run.order[i]
            if math.isnan(w.run.job[job].finish_s):
                run.order[kept] = job
                kept += 1
        c[C_ACTIVE] = kept
        c[C_FRESH] += c[C_FINISHED]  # the round differs from the last
        c[C_FINISHED] = 0
        c[C_TOLD] = 0
    return True


@inner
def _order(w: World, now: float) -> bool:
    """Bring the unfinished jobs into order; whether that is the order of the last decision."""
    run, c = w.run, w.run.counters
    n = c[C_ACTIVE]
    code = w.choice.ordering
    if code in (FTF, FTF_PUBLIC):  # their keys change with time alone
        for i in range(n):
            w.jobs[run.order[i]].dirty = True
    order_jobs(code, now, run.order, n, w.jobs, w.demand, w.context, run.sort_scratch)
    same = c[C_FRESH] == 0 and c[C_DECISIONS] > 0
    if same:
        for i in range(n):
            if run.order[i] != run.previous_order[i]:
                same = False
                break
    for i in range(n):
        run.previous_order[i] = run.order[i]
    c[C_FRESH] = 0
    return same


@inner
def _remember(w: World) -> None:
    """Keep the last decision for comparison."""
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
    """Seconds per iteration where the job runs now: its slowest node sets the pace of a gang."""
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
    """Whether a running job holds other GPUs than after the last decision; the order of its nodes means nothing."""
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
    """Whether a job on the same GPUs gets other CPU or memory than before: levels may differ by name alone."""
    alloc, typ, level = w.alloc, w.jobs[job].type, w.alloc.job[job].level
    for e in range(alloc.job[job].first, alloc.job[job].first + alloc.job[job].count):
        kind = w.nodes[alloc.entry[e].node].kind
        has, had = w.demand.amount[level, typ, kind], w.demand.amount[old, typ, kind]
        if has.cpu != had.cpu or has.memory != had.memory:
            return True
    return False


@inner
def _tell_running(w: World, now: float, job: int, moved: bool) -> None:
    """Tell that a job runs that did not, or runs elsewhere, or with other CPU and memory."""
    progress, level = w.run.job, w.alloc.job[job].level
    old = progress[job].old_level
    progress[job].iteration_s = _pace(w, job)
    if progress[job].started and (moved or old == NOT_RUNNING):
        progress[job].debt_s += w.options.resume_cost_s
    if old == NOT_RUNNING:
        reason = R_RESERVED if w.jobs[job].rank == RESERVED_PRIORITY else R_IN_ORDER
        _tell(w, now, job, RESUME if progress[job].started else START, reason, HOLDS)
        progress[job].started = True
        progress[job].told_waiting = False
    elif moved and w.options.record_moves:
        _tell(w, now, job, MOVE, R_REPLACED, HOLDS)
    elif _gets_other(w, job, old):
        _tell(w, now, job, RESIZE, R_GAVE_WAY if level != IDEAL else R_GOT_IDEAL, HOLDS)


@inner
def _tell_waiting(w: World, now: float, job: int) -> None:
    """Tell that a job lost its share, or did not get one."""
    progress, why = w.run.job, w.jobs[job].reason
    if progress[job].old_level != NOT_RUNNING:
        _tell(w, now, job, PREEMPT, R_OUTRANKED if why == R_GPUS_FULL else why, HOLDS_NOT)
    else:
        _tell(w, now, job, WAIT, why, HOLDS_NOT)
    progress[job].told_waiting = True


@inner
def _tell_changes(w: World, now: float) -> bool:
    """Tell what the decision changed; False when the buffers are full."""
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
        if _no_room(w, alloc.job[job].count):
            c[C_EMIT] = i
            return False
        if level != NOT_RUNNING:
            _tell_running(w, now, job, moved)
        else:
            _tell_waiting(w, now, job)
    c[C_EMIT] = 0
    return True


@inner
def _tell_round(w: World, now: float) -> None:
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


@inlined
def _serve_job(jobs: Array, progress: Array, o: Options, now: float, job: int) -> bool:
    """Credit one lease to a running job; whether it ended."""
    delay = min(progress[job].debt_s, o.lease_s)
    time = o.lease_s
    if delay > 0.0:
        progress[job].debt_s -= delay
        time -= delay
    pace = progress[job].iteration_s
    left = jobs[job].total - jobs[job].done
    jobs[job].dirty = True
    jobs[job].last_run_s = now + o.lease_s
    steps = time / pace
    if o.whole_iterations and steps >= 1.0:
        steps = math.floor(steps)
    ended = steps >= left * (1.0 - 1e-12)
    used = o.lease_s
    if ended:
        if o.exact_finish:
            used = delay + min(left * pace, time)
        steps = left
        progress[job].finish_s = now + used
    jobs[job].done += steps
    jobs[job].attained_s += used
    return ended


@inner
def _serve(w: World, now: float) -> None:
    """Credit the lease to every running job and note which end, by finish time."""
    run, c = w.run, w.run.counters
    ends = 0
    anybody = False
    owing = True  # restarts take the whole lease of everybody who runs
    grants = w.alloc.job
    for i in range(c[C_ACTIVE]):
        job = run.order[i]
        if grants[job].level == NOT_RUNNING:
            continue
        anybody = True
        owing = owing and run.job[job].debt_s >= w.options.lease_s
        if _serve_job(w.jobs, run.job, w.options, now, job):
            run.ended[ends] = job
            ends += 1
    c[C_FINISHED] = ends
    c[C_TOLD] = 0
    c[C_IDLE] = c[C_IDLE] + 1 if anybody and owing else ZERO
    if not anybody:
        c[C_STALLED] = 1
    if w.options.exact_finish:
        for i in range(1, ends):  # few end in one lease: insertion is enough
            job = run.ended[i]
            k = i - 1
            while k >= 0 and run.job[run.ended[k]].finish_s > run.job[job].finish_s:
                run.ended[k + 1] = run.ended[k]
                k -= 1
            run.ended[k + 1] = job


@bare
def advance(w: World) -> int:
    """Go on until DONE, until the buffers are full (FLUSH), or until the allotment wants levels (NEED_LEVELS).

    NOWHERE: for `idle_limit` rounds restarts took the whole lease of everybody who ran.
    """
    run, c = w.run, w.run.counters
    while True:
        now = c[C_TICK] * w.options.lease_s
        if c[C_PHASE] == P_TICK:
            if not _admit(w, now):
                return FLUSH
            if c[C_ACTIVE] == 0:
                if c[C_NEXT] >= len(w.jobs):
                    return DONE
                c[C_TICK] = max(c[C_TICK], math.ceil(w.jobs[c[C_NEXT]].arrival_s / w.options.lease_s))
                continue
            same = _order(w, now) and not w.choice.sticky
            c[C_SAME] = 1 if same else 0
            c[C_PHASE] = P_SERVE if same else P_DECIDE
            if not same and w.choice.allotment == A_OPTIMAL:
                return NEED_LEVELS
        if c[C_PHASE] == P_DECIDE:
            _remember(w)
            c[C_RUNNING] = decide(run.order, c[C_ACTIVE], w.jobs, w.alloc, w.demand, w.nodes, w.choice, w.scratch)
            c[C_DECISIONS] += 1
            c[C_PHASE] = P_TELL
        if c[C_PHASE] == P_TELL:
            if not _tell_changes(w, now):
                return FLUSH
            c[C_PHASE] = P_SERVE
        if c[C_PHASE] == P_SERVE:
            if _no_room(w, ZERO):
                return FLUSH
            _tell_round(w, now)
            _serve(w, now)
            if c[C_STALLED] == 1 and c[C_NEXT] >= len(w.jobs):
                return DONE  # nobody runs and nobody will come: the rest can never run here
            c[C_STALLED] = 0
            if c[C_IDLE] > w.options.idle_limit:
                return NOWHERE
            c[C_TICK] += 1
            c[C_PHASE] = P_TICK
