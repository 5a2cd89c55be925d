"""The event loop of the training simulator, compiled. It runs until its buffers are full or a decision needs Python.

A tick is the start of a lease. What happens at one: jobs that ended and arrived since the last are told, the rest is
ordered, the policy decides, changes are told, and the lease is served at once, since nothing can change before its end.
"""

from __future__ import annotations

import math

import numpy as np

from cotenant.model.events import Kind, Reason
from cotenant.policy.allotment import A_OPTIMAL
from cotenant.policy.arrays import IDEAL, NOT_RUNNING
from cotenant.policy.compiled import jit
from cotenant.policy.ordering import FTF, FTF_PUBLIC, RESERVED_PRIORITY, order_jobs
from cotenant.policy.rounds import decide
from cotenant.sim.state import (
    C_ACTIVE,
    C_DECISIONS,
    C_EMIT,
    C_EVENTS,
    C_FINISHED,
    C_FRESH,
    C_NEXT,
    C_NODES,
    C_PHASE,
    C_ROUNDS,
    C_RUNNING,
    C_SAME,
    C_STALLED,
    C_TICK,
    C_TOLD,
    World,
)  # fmt: skip

# why `advance` came back
DONE, FLUSH, NEED_LEVELS = 0, 1, 2
# where to go on
P_TICK, P_DECIDE, P_TELL, P_SERVE = 0, 1, 2, 3

ARRIVE, START, RESUME, MOVE, RESIZE, PREEMPT, FINISH, WAIT = (int(k) for k in list(Kind)[:8])
R_NONE, R_IN_ORDER, R_RESERVED = int(Reason.NONE), int(Reason.IN_ORDER), int(Reason.RESERVED)
R_GAVE_WAY, R_GOT_IDEAL = int(Reason.GAVE_WAY), int(Reason.GOT_IDEAL)
R_REPLACED, R_OUTRANKED, R_DONE = int(Reason.REPLACED), int(Reason.OUTRANKED), int(Reason.DONE)
R_GPUS_FULL = int(Reason.GPUS_FULL)


@jit
def _gpus_of(w: World, job: int) -> float:
    part = w.demand.type[w.jobs[job].type].part_milli
    return part / 1000.0 if part > 0 else float(w.demand.type[w.jobs[job].type].gpus)


@jit
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


@jit
def _no_room(w: World, nodes: int) -> bool:
    c = w.run.counters
    return (
        c[C_EVENTS] + 1 >= len(w.out.event)
        or c[C_NODES] + nodes >= len(w.out.node)
        or c[C_ROUNDS] + 1 >= len(w.out.round)
    )


@jit
def _admit(w: World, now: float) -> bool:
    """Tell ends and arrivals up to now, in time order; False when the buffers are full."""
    run, c = w.run, w.run.counters
    while True:
        if _no_room(w, 0):
            return False
        has_end = c[C_TOLD] < c[C_FINISHED]
        has_arrival = c[C_NEXT] < len(w.jobs) and w.jobs[c[C_NEXT]].arrival_s <= now
        if not has_end and not has_arrival:
            break
        if has_end and (
            not has_arrival or w.run.job[run.ended[c[C_TOLD]]].finish_s <= w.jobs[c[C_NEXT]].arrival_s
        ):
            job = run.ended[c[C_TOLD]]
            _tell(w, w.run.job[job].finish_s, job, FINISH, R_DONE, False)
            run.wanted_gpus[0] -= _gpus_of(w, job)
            c[C_TOLD] += 1
        else:
            job = c[C_NEXT]
            _tell(w, w.jobs[job].arrival_s, job, ARRIVE, R_NONE, False)
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


@jit
def _order(w: World, now: float) -> bool:
    """Bring the unfinished jobs into order; whether that is the order of the last decision."""
    run, c = w.run, w.run.counters
    n = c[C_ACTIVE]
    code = w.choice.ordering
    if code in (FTF, FTF_PUBLIC):  # their keys change with time alone
        for i in range(n):
            w.jobs[run.order[i]].dirty = True
    order_jobs(
        code, now, run.order, n, w.jobs, w.demand, w.context, run.sort_scratch
    )
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


@jit
def _remember(w: World) -> None:
    """Keep the last decision for comparison."""
    run, alloc, c = w.run, w.alloc, w.run.counters
    for i in range(alloc.used[0]):
        run.old_entry[i] = alloc.entry[i]
    for i in range(c[C_ACTIVE]):
        job = run.order[i]
        w.run.job[job].old_first = alloc.job[job].first
        w.run.job[job].old_count = alloc.job[job].count
        w.run.job[job].old_level = alloc.job[job].level


@jit
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


@jit
def _moved(w: World, job: int) -> bool:
    run, alloc = w.run, w.alloc
    if alloc.job[job].count != w.run.job[job].old_count:
        return True
    for i in range(alloc.job[job].count):
        a, b = alloc.job[job].first + i, w.run.job[job].old_first + i
        if alloc.entry[a].node != run.old_entry[b].node or alloc.entry[a].gpus != run.old_entry[b].gpus:
            return True
    return False


@jit
def _tell_running(w: World, now: float, job: int, compare: bool) -> None:
    alloc = w.alloc
    level, old = alloc.job[job].level, w.run.job[job].old_level
    if old == NOT_RUNNING:
        w.run.job[job].iteration_s = _pace(w, job)
        reason = R_RESERVED if w.jobs[job].rank == RESERVED_PRIORITY else R_IN_ORDER
        if w.run.job[job].started:
            w.run.job[job].debt_s += w.options.resume_cost_s
        _tell(w, now, job, RESUME if w.run.job[job].started else START, reason, True)
        w.run.job[job].started = True
        return
    moved = compare and _moved(w, job)
    if moved or level != old:
        w.run.job[job].iteration_s = _pace(w, job)
    elif not compare:
        w.run.job[job].iteration_s = _pace(w, job)  # moves are not told, but a move may change the pace
    if moved:
        w.run.job[job].debt_s += w.options.resume_cost_s
        _tell(w, now, job, MOVE, R_REPLACED, True)
    elif level != old:
        _tell(w, now, job, RESIZE, R_GAVE_WAY if level != IDEAL else R_GOT_IDEAL, True)


@jit
def _tell_changes(w: World, now: float) -> bool:
    """Tell what the decision changed; False when the buffers are full."""
    run, alloc, c = w.run, w.alloc, w.run.counters
    compare = w.options.record_moves or w.options.resume_cost_s > 0
    for i in range(c[C_EMIT], c[C_ACTIVE]):
        job = run.order[i]
        if _no_room(w, alloc.job[job].count):
            c[C_EMIT] = i
            return False
        if alloc.job[job].level != NOT_RUNNING:
            _tell_running(w, now, job, compare)
            w.run.job[job].told_waiting = False
        else:
            why = w.jobs[job].reason
            if w.run.job[job].old_level != NOT_RUNNING:
                w.run.job[job].told_waiting = True
                _tell(w, now, job, PREEMPT, R_OUTRANKED if why == R_GPUS_FULL else why, False)
            elif not w.run.job[job].told_waiting:
                w.run.job[job].told_waiting = True
                _tell(w, now, job, WAIT, why, False)
    c[C_EMIT] = 0
    return True


@jit
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


@jit
def _serve_job(w: World, now: float, job: int) -> bool:
    """Credit one lease to a running job; whether it ended."""
    o = w.options
    w.jobs[job].dirty = True
    delay = min(w.run.job[job].debt_s, o.lease_s)
    w.run.job[job].debt_s -= delay
    time = o.lease_s - delay
    pace = w.run.job[job].iteration_s
    left = w.jobs[job].total - w.jobs[job].done
    w.jobs[job].last_run_s = now + o.lease_s
    steps = time / pace
    if o.whole_iterations and steps >= 1.0:
        steps = math.floor(steps)
    if steps < left * (1.0 - 1e-12):
        w.jobs[job].done += steps
        w.jobs[job].attained_s += o.lease_s
        return False
    w.jobs[job].done = w.jobs[job].total
    used = delay + min(left * pace, time) if o.exact_finish else o.lease_s
    w.jobs[job].attained_s += used
    w.run.job[job].finish_s = now + used
    return True


@jit
def _serve(w: World, now: float) -> None:
    """Credit the lease to every running job and note which end, by finish time."""
    run, c = w.run, w.run.counters
    ends = 0
    progress = False
    for i in range(c[C_ACTIVE]):
        job = run.order[i]
        if w.alloc.job[job].level == NOT_RUNNING:
            continue
        progress = True
        if _serve_job(w, now, job):
            run.ended[ends] = job
            ends += 1
    c[C_FINISHED] = ends
    c[C_TOLD] = 0
    if not progress:
        c[C_STALLED] = 1
    if w.options.exact_finish and ends > 1:
        times = np.empty(ends)
        for i in range(ends):
            times[i] = w.run.job[run.ended[i]].finish_s
        by_time = np.argsort(times, kind="mergesort")
        ended = run.ended[:ends].copy()
        for i in range(ends):
            run.ended[i] = ended[by_time[i]]


@jit
def advance(w: World) -> int:
    """Go on until DONE, until the buffers are full (FLUSH), or until the allotment wants levels (NEED_LEVELS)."""
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
            c[C_RUNNING] = decide(
                run.order, c[C_ACTIVE], w.jobs, w.alloc, w.demand, w.nodes, w.choice, w.scratch
            )
            c[C_DECISIONS] += 1
            c[C_PHASE] = P_TELL
        if c[C_PHASE] == P_TELL:
            if not _tell_changes(w, now):
                return FLUSH
            c[C_PHASE] = P_SERVE
        if c[C_PHASE] == P_SERVE:
            if _no_room(w, 0):
                return FLUSH
            _tell_round(w, now)
            _serve(w, now)
            if c[C_STALLED] == 1 and c[C_NEXT] >= len(w.jobs):
                return DONE  # nobody runs and nobody will come: the rest can never run here
            c[C_STALLED] = 0
            c[C_TICK] += 1
            c[C_PHASE] = P_TICK

