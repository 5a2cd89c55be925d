"""The compiled event loop of the training simulator. It runs until its buffers are full or a decision needs Python.

A *tick* is the start of a lease, the time for which a decision holds. At a tick, the jobs that have ended and arrived
since the previous one are recorded, the unfinished ones are ordered, the policy decides, changes are recorded, and the
work of the lease is credited at once, since nothing can change before its end.
"""

from __future__ import annotations

import math

from cotenant.policy.compiled import bare, inlined, inner
from cotenant.policy.jobs.arrays import NOT_RUNNING, Array
from cotenant.policy.jobs.ordering import FTF, FTF_PUBLIC, RESERVED_PRIORITY, order_jobs
from cotenant.policy.jobs.rounds import decide
from cotenant.sim.jobs.state import (
    C_ACTIVE,
    C_DECISIONS,
    C_FINISHED,
    C_FRESH,
    C_IDLE,
    C_MORE,
    C_NEXT,
    C_PHASE,
    C_RUNNING,
    C_SAME,
    C_STALLED,
    C_TICK,
    C_TOLD,
    Options,
    World,
)
from cotenant.sim.jobs.telling import (
    ARRIVE,
    FINISH,
    HOLDS_NOT,
    R_DONE,
    R_NONE,
    ZERO,
    gpus_of,
    no_room,
    remember,
    tell,
    tell_changes,
    tell_round,
)

# the reasons for which `advance`, the event loop, returns
DONE, FLUSH, NEED_CHOICE, NOWHERE = 0, 1, 2, 3
# the steps of a tick (the start of a lease); after an interruption, the loop continues with the same step
P_TICK, P_DECIDE, P_TELL, P_SERVE = 0, 1, 2, 3


@inner
def _admit(w: World, now: float) -> bool:
    """Record the ends and arrivals of jobs up to now, in time order. False: the buffers are full, or the next arrival
    is not loaded yet.
    """
    run, c = w.run, w.run.counters
    while True:
        if no_room(w, ZERO) or (c[C_MORE] == 1 and c[C_NEXT] == len(w.jobs)):
            return False
        has_end = c[C_TOLD] < c[C_FINISHED]
        has_arrival = c[C_NEXT] < len(w.jobs) and w.jobs[c[C_NEXT]].arrival_s <= now
        if not has_end and not has_arrival:
            break
        if has_end and (not has_arrival or w.run.job[run.ended[c[C_TOLD]]].finish_s <= w.jobs[c[C_NEXT]].arrival_s):
            job = run.ended[c[C_TOLD]]
            tell(w, w.run.job[job].finish_s, job, FINISH, R_DONE, HOLDS_NOT)
            run.wanted_gpus[0] -= gpus_of(w, job)
            c[C_TOLD] += 1
        else:
            job = c[C_NEXT]
            tell(w, w.jobs[job].arrival_s, job, ARRIVE, R_NONE, HOLDS_NOT)
            run.wanted_gpus[0] += gpus_of(w, job)
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
        # the counter C_FRESH marks that the unfinished jobs differ from those of the previous round
        c[C_FRESH] += c[C_FINISHED]
        c[C_FINISHED] = 0
        c[C_TOLD] = 0
    return True


@inner
def _order(w: World, now: float) -> bool:
    """Order the unfinished jobs. Returns whether the policy's last decision remains valid, so that it need not decide
    again.
    """
    run, c = w.run, w.run.counters
    n = c[C_ACTIVE]
    code = w.choice.ordering
    if code in (FTF, FTF_PUBLIC):  # the keys of these orderings change even if only time passes
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
    # A job with a reservation (it has waited too long) is the first in the order, and keeps its GPUs once it runs.
    # While there is one, decisions depend on the GPUs that it holds, too, not only on the order, so none is reused.
    return same and w.jobs[run.order[0]].rank < RESERVED_PRIORITY


@inlined
def _serve_job(jobs: Array, progress: Array, o: Options, now: float, job: int) -> bool:
    """Credit the work of one lease to a running job. Returns whether the job has ended."""
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
    """Credit the work of the lease to every running job, and store those that end, ordered by finish time."""
    run, c = w.run, w.run.counters
    ends = 0
    anybody = False
    owing = True  # whether restarts take the whole lease of all running jobs
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
    c[C_STALLED] = ZERO if anybody or c[C_NEXT] < len(w.jobs) else c[C_STALLED] + 1
    if w.options.exact_finish:
        for i in range(1, ends):  # an insertion sort is fast enough, because few jobs end in one lease
            job = run.ended[i]
            k = i - 1
            while k >= 0 and run.job[run.ended[k]].finish_s > run.job[job].finish_s:
                run.ended[k + 1] = run.ended[k]
                k -= 1
            run.ended[k + 1] = job


@bare
def advance(w: World) -> int:
    """Run the event loop until the end (DONE), until buffers are full or arrivals are missing (FLUSH), or until the
    policy has to decide (NEED_CHOICE). NOWHERE: for `idle_limit` rounds restarts took the whole lease of all running
    jobs.
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
            if not same:
                remember(w)
                if w.choice.asks:
                    return NEED_CHOICE
        if c[C_PHASE] == P_DECIDE:
            c[C_RUNNING] = decide(run.order, c[C_ACTIVE], w.jobs, w.alloc, w.demand, w.nodes, w.choice, w.scratch)
            c[C_DECISIONS] += 1
            c[C_PHASE] = P_TELL
        if c[C_PHASE] == P_TELL:
            if not tell_changes(w, now):
                return FLUSH
            c[C_PHASE] = P_SERVE
        if c[C_PHASE] == P_SERVE:
            if no_room(w, ZERO):
                return FLUSH
            tell_round(w, now)
            _serve(w, now)
            if c[C_STALLED] > w.options.patience:
                return DONE  # the cluster is idle and no job will arrive, so the waiting jobs can never run on it
            if c[C_IDLE] > w.options.idle_limit:
                return NOWHERE
            c[C_TICK] += 1
            c[C_PHASE] = P_TICK
