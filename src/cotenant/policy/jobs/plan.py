"""A job policy as a pure function on plain data: it takes a Snapshot and the time, and returns a Plan.

It fills the arrays of the compiled kernels and calls the same functions as the simulator. Live controllers use it.
"""

from __future__ import annotations

import numpy as np

from cotenant.core.events import Reason
from cotenant.core.plan import Grant, Plan, Snapshot
from cotenant.policy.jobs.arrays import IDEAL, JOB, NOT_RUNNING, PROPORTIONAL, Allocation, Array, make_allocation
from cotenant.policy.jobs.choice import JobPolicy
from cotenant.policy.jobs.demand import Workload, build_workload
from cotenant.policy.jobs.optimal import LevelChooser
from cotenant.policy.jobs.rounds import decide_ordered, gang_prefix, make_scratch, order_at
from cotenant.policy.jobs.running import adopt, enter, with_parts, without
from cotenant.profiles.training.tables import Profiles


def plan_jobs(snapshot: Snapshot, now_s: float, policy: JobPolicy, profiles: Profiles) -> Plan:
    """Decide which jobs run from `now_s` on (seconds, on the clock of the jobs' arrivals), and their nodes, CPU and
    memory.

    Raises InputError as `demand.build_workload` does. The same snapshot always gives the same plan.
    """
    work = build_workload(
        snapshot.jobs,
        profiles,
        snapshot.cluster,
        proportional_keys=policy.allotment == "proportional",
        grid=policy.allotment == "optimal",
    )
    n, rows = len(snapshot.jobs), {name: row for row, name in enumerate(snapshot.jobs.id.tolist())}
    jobs, held = _job_array(snapshot, work), snapshot.held
    for grant in snapshot.running:
        # a job that must not be preempted has for this decision what a job with a reservation has
        jobs["reserved"][rows[grant.job]] = grant.reserved or grant.job in snapshot.pinned
    types = work.demand.type
    gpus = np.where(types["part_milli"] > 0, types["part_milli"] / 1000.0, types["gpus"])
    gpu_seconds = (gpus * types["isolated_s"])[work.type] * work.iterations
    context = policy.context(gpu_seconds, float(work.nodes["gpus"].sum()))
    choice, order = policy.choice(), np.arange(n)
    order_at(choice.ordering, now_s, order, n, jobs, work.demand, context, np.zeros(2 * n, np.int64))
    keep = {rows[grant.job] for grant in held if grant.job in rows}
    order = np.array([row for row in order.tolist() if row not in keep], np.int64)

    nodes, parts = without(work.nodes, held), [grant for grant in held if 0 < grant.node_gpus[0] < 1]
    demand, jobs = with_parts(work.demand, jobs, parts) if parts else (work.demand, jobs)
    alloc = make_allocation(demand, work.nodes, len(jobs))
    for i, grant in enumerate(parts):
        enter(alloc, n + i, grant, int(PROPORTIONAL))
    adopt(alloc, work, nodes, [(rows[g.job], g) for g in snapshot.running], parts, policy.allotment, jobs["reserved"])
    scratch = make_scratch(alloc)
    if policy.allotment == "optimal":
        chooser = LevelChooser(work.demand, nodes, policy.solver_limit_s)
        count = gang_prefix(order, len(order), jobs, work.demand, int(nodes["gpus"].sum()), scratch.selected)
        chooser.choose(scratch.selected[:count], jobs)
    order = np.concatenate([np.arange(n, len(jobs)), order])
    decide_ordered(order, len(order), jobs, alloc, demand, nodes, choice, scratch)
    for grant in snapshot.running:
        jobs["reserved"][rows[grant.job]] &= grant.reserved or grant.job not in snapshot.pinned
    order = order[len(parts) :]
    runs = [int(row) for row in order if alloc.job["level"][row] != NOT_RUNNING]
    grants = _grants(snapshot, work, alloc, jobs, np.array(runs, dtype=np.int64))
    kept = {grant.job for grant in grants}
    waiting = {
        str(snapshot.jobs.id[row]): Reason(int(jobs["reason"][row]))
        for row in order
        if alloc.job["level"][row] == NOT_RUNNING
    }
    return Plan(grants, tuple(g.job for g in snapshot.running if g.job not in kept), waiting)


def _job_array(snapshot: Snapshot, work: Workload) -> Array:
    jobs = np.zeros(len(snapshot.jobs), JOB)
    jobs["type"] = work.type
    jobs["priority"] = snapshot.jobs.priority
    jobs["arrival_s"] = snapshot.jobs.arrival_s
    jobs["last_run_s"] = snapshot.last_run_s
    jobs["total"] = work.iterations
    jobs["done"] = snapshot.done * work.iterations
    jobs["attained_s"] = snapshot.attained_s
    jobs["wanted"] = IDEAL
    jobs["dirty"] = True
    return jobs


def _grants(snapshot: Snapshot, work: Workload, alloc: Allocation, jobs: Array, rows: Array) -> tuple[Grant, ...]:
    """Return the grants of the jobs in `rows`, in that order: each job's nodes, GPUs, CPU and memory. All are converted
    together, because there may be thousands.
    """
    if len(rows) == 0:
        return ()
    held, types = alloc.job[rows], work.type[rows]
    counts = held["count"].astype(np.int64)
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    owner = np.repeat(np.arange(len(rows)), counts)
    entries = alloc.entry[held["first"][owner] + np.arange(len(owner)) - starts[owner]]
    kinds = work.nodes["kind"][entries["node"]]
    amount = work.demand.amount[held["level"][owner], types[owner], kinds]
    table = work.demand.type
    pace = np.maximum.reduceat(amount["iteration_s"], starts).astype(float)
    pace /= np.where(counts > 1, table["multi_node_factor"][types], 1.0)
    cpus = (amount["cpu"] * entries["gpus"] / 1000).tolist()
    memory = (amount["memory"].astype(np.int64) * entries["gpus"] * 10**6).tolist()
    ids, levels = snapshot.jobs.id[rows].tolist(), held["level"].tolist()
    parts, speed = table["part_milli"][types].tolist(), (table["isolated_s"][types] / pace).tolist()
    reserved = jobs["reserved"][rows].astype(bool).tolist()
    nodes, gpus, slots = entries["node"].tolist(), entries["gpus"].astype(float).tolist(), entries["slot"].tolist()
    bounds = zip(starts.tolist(), (starts + counts).tolist(), strict=True)
    return tuple(
        Grant(
            job=str(ids[i]),
            nodes=tuple(nodes[first:end]),
            node_gpus=(parts[i] / 1000,) if parts[i] else tuple(gpus[first:end]),
            node_cpus=tuple(cpus[first:end]),
            node_memory=tuple(memory[first:end]),
            level=levels[i],
            speed=speed[i],
            reserved=reserved[i],
            slot=slots[first],
        )
        for i, (first, end) in enumerate(bounds)
    )
