"""A job policy as a pure function on plain data: it takes a Snapshot and the time, and returns a Plan.

It fills the arrays of the compiled kernels and calls the same functions as the simulator. Live controllers use it.
"""

from __future__ import annotations

import numpy as np

from cotenant.core.events import Reason
from cotenant.core.plan import Grant, Plan, Snapshot
from cotenant.policy.jobs.arrays import IDEAL, JOB, NOT_RUNNING, Allocation, Array, make_allocation
from cotenant.policy.jobs.choice import JobPolicy
from cotenant.policy.jobs.demand import Workload, build_workload
from cotenant.policy.jobs.optimal import LevelChooser
from cotenant.policy.jobs.rounds import decide_ordered, gang_prefix, make_scratch, order_at
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
    n = len(snapshot.jobs)
    jobs = _job_array(snapshot, work)
    alloc = make_allocation(work.demand, work.nodes, n)
    rows = {name: row for row, name in enumerate(snapshot.jobs.id.tolist())}
    _adopt(alloc, snapshot, rows)
    for grant in snapshot.running:
        jobs["reserved"][rows[grant.job]] = grant.reserved
    choice, scratch, order = policy.choice(), make_scratch(alloc), np.arange(n)
    types = work.demand.type
    gpus = np.where(types["part_milli"] > 0, types["part_milli"] / 1000.0, types["gpus"])
    gpu_seconds = (gpus * types["isolated_s"])[work.type] * work.iterations
    context = policy.context(gpu_seconds, float(work.nodes["gpus"].sum()))
    order_at(choice.ordering, now_s, order, n, jobs, work.demand, context, np.zeros(2 * n, np.int64))
    if policy.allotment == "optimal":
        chooser = LevelChooser(work.demand, work.nodes, policy.solver_limit_s)
        count = gang_prefix(order, n, jobs, work.demand, int(work.nodes["gpus"].sum()), scratch.selected)
        chooser.choose(scratch.selected[:count], jobs)
    decide_ordered(order, n, jobs, alloc, work.demand, work.nodes, choice, scratch)
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


def _adopt(alloc: Allocation, snapshot: Snapshot, rows: dict[str, int]) -> None:
    """Enter the running jobs' grants as if the policy had decided them, so that the policy may leave these jobs on
    their GPUs."""
    used = 0
    for grant in snapshot.running:
        row = rows[grant.job]
        alloc.job["first"][row], alloc.job["count"][row] = used, len(grant.nodes)
        alloc.job["level"][row] = grant.level
        for node, gpus in zip(grant.nodes, grant.node_gpus, strict=True):
            part = gpus < 1
            entry = alloc.entry[used]
            entry["node"], entry["gpus"], entry["job"] = node, 1 if part else round(gpus), row
            entry["slot"] = grant.slot
            used += 1
    alloc.used[0] = used


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
