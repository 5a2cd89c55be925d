"""The allotment: how much CPU and memory a job gets together with its GPUs. ALLOTMENTS is the registry; the code is
compiled.

A job's *level* selects its amounts from a table: PROPORTIONAL to its GPUs, IDEAL (its profile's demand), DOWN (the
smaller of both, for CPU and for memory separately), or, from GRID on, one of the combinations of CPU and memory among
which the allotment `optimal` chooses. `tune` follows Synergy (OSDI'22, section 4): a job gets its ideal demand if it
fits, otherwise its proportional share. If even that does not fit, jobs that hold more than theirs return the excess. So
no GPU is idle for lack of CPU or memory, and no job runs slower than at its proportional share.
"""

from __future__ import annotations

from typing import Any

from cotenant.policy.compiled import inlined, inner
from cotenant.policy.jobs.arrays import DOWN, GRID, IDEAL, NOT_RUNNING, PROPORTIONAL, Allocation, Array, Demand
from cotenant.policy.jobs.placement import lower_pointers, place, place_inlined

ALLOTMENTS: dict[str, tuple[int, str]] = {
    "proportional": (0, "CPU and memory in proportion to GPUs"),
    "greedy": (1, "ideal CPU and memory; if that does not fit, the job waits for the next round"),
    "tune": (2, "ideal CPU and memory, reduced to proportional where needed; GPUs are never idle for lack of them"),
    "optimal": (3, "CPU and memory by a mixed-integer program that maximises total throughput each round"),
}
A_PROPORTIONAL, A_GREEDY, A_TUNE, A_OPTIMAL = 0, 1, 2, 3
# value of the allotment under elastic policies, which choose the demand type and the level of every job themselves
A_ELASTIC = 4


@inner
def _victim_servers(alloc: Allocation, demand: Demand, nodes: Array, typ: int, servers: Any, shares: Any) -> int:
    """Choose the nodes from which a job of the type will take its GPUs, and how many on each. Returns the number of
    nodes; 0: there are too few free GPUs.
    """
    g = demand.type[typ].gpus
    n = len(nodes)
    if g > 1:
        for node in range(n):
            if alloc.node[node].free_gpus >= g and demand.allowed[typ, nodes[node].kind]:
                servers[0] = node
                shares[0] = g
                return 1
    covered = 0
    found = 0
    part = demand.type[typ].part_milli
    for free in range(0 if part > 0 else 1, alloc.bucket.shape[0]):
        for node in range(n):
            if alloc.node[node].free_gpus != free or not demand.allowed[typ, nodes[node].kind]:
                continue
            k = min(free, g - covered)
            if part > 0:
                room = free > 0
                for s in range(alloc.slots.shape[1]):
                    room = room or alloc.slots[node, s] >= part
                if not room:
                    continue
                k = 1
            servers[found] = node
            shares[found] = k
            found += 1
            covered += k
            if covered >= g:
                return found
    return 0


@inner
def _entry_amount(demand: Demand, nodes: Array, typ: int, level: int, node: int, gpus: int) -> tuple[int, int]:
    kind = nodes[node].kind
    return demand.amount[level, typ, kind].cpu * gpus, demand.amount[level, typ, kind].memory * gpus


@inner
def _shrink(alloc: Allocation, demand: Demand, nodes: Array, job: int, typ: int) -> None:
    """Reduce a running job's CPU and memory to level DOWN, the least, on the GPUs that it has."""
    old = alloc.job[job].level
    for e in range(alloc.job[job].first, alloc.job[job].first + alloc.job[job].count):
        node = alloc.entry[e].node
        had_cpu, had_memory = _entry_amount(demand, nodes, typ, old, node, alloc.entry[e].gpus)
        has_cpu, has_memory = _entry_amount(demand, nodes, typ, DOWN, node, alloc.entry[e].gpus)
        alloc.node[node].free_cpu += had_cpu - has_cpu
        alloc.node[node].free_memory += had_memory - has_memory
        lower_pointers(alloc, node)
    alloc.job[job].level = DOWN


@inner
def _before(alloc: Allocation, demand: Demand, nodes: Array, jobs: Any, node: int, a: int, b: int) -> bool:
    """Whether a node's entry a (a job's part on the node) is reduced before its entry b: first the job on the fewest
    nodes, then the one with the most CPU per GPU, then the one with the most memory per GPU, then the oldest.
    """
    ja, jb = alloc.entry[a].job, alloc.entry[b].job
    if alloc.job[ja].count != alloc.job[jb].count:
        return alloc.job[ja].count < alloc.job[jb].count
    kind = nodes[node].kind
    ca = demand.amount[alloc.job[ja].level, jobs[ja].type, kind].cpu
    cb = demand.amount[alloc.job[jb].level, jobs[jb].type, kind].cpu
    if ca != cb:
        return ca > cb
    ma = demand.amount[alloc.job[ja].level, jobs[ja].type, kind].memory
    mb = demand.amount[alloc.job[jb].level, jobs[jb].type, kind].memory
    if ma != mb:
        return ma > mb
    return a < b


@inner
def _can_give(alloc: Allocation, demand: Demand, nodes: Array, job: int, typ: int) -> bool:
    """Whether a running job can be cut to its smallest allotment (DOWN) without getting more CPU or more memory than it
    has. A profiled allotment can have less of one of them than DOWN.
    """
    level = alloc.job[job].level
    if level == DOWN or not demand.type[typ].can_shrink:
        return False
    if level >= GRID:
        for e in range(alloc.job[job].first, alloc.job[job].first + alloc.job[job].count):
            kind = nodes[alloc.entry[e].node].kind
            has, down = demand.amount[level, typ, kind], demand.amount[DOWN, typ, kind]
            if has.cpu < down.cpu or has.memory < down.memory:
                return False
    return True


@inner
def _reclaim(
    alloc: Allocation, demand: Demand, nodes: Array, jobs: Any, node: int, need_cpu: int, need_memory: int
) -> None:
    """Reduce jobs on the node to level DOWN (the least CPU and memory for their GPUs) until `need_cpu` and
    `need_memory` are free, or no job has more than DOWN.
    """
    while need_cpu > 0 or need_memory > 0:
        best = -1
        e = alloc.node[node].head
        while e >= 0:
            job = alloc.entry[e].job
            if _can_give(alloc, demand, nodes, job, jobs[job].type):
                had = _entry_amount(demand, nodes, jobs[job].type, alloc.job[job].level, node, alloc.entry[e].gpus)
                has = _entry_amount(demand, nodes, jobs[job].type, DOWN, node, alloc.entry[e].gpus)
                useful = (need_cpu > 0 and had[0] > has[0]) or (need_memory > 0 and had[1] > has[1])
                if useful and (best < 0 or _before(alloc, demand, nodes, jobs, node, e, best)):
                    best = e
            e = alloc.entry[e].next
        if best < 0:
            return
        job = alloc.entry[best].job
        had = _entry_amount(demand, nodes, jobs[job].type, alloc.job[job].level, node, alloc.entry[best].gpus)
        _shrink(alloc, demand, nodes, job, jobs[job].type)
        has = _entry_amount(demand, nodes, jobs[job].type, DOWN, node, alloc.entry[best].gpus)
        need_cpu -= had[0] - has[0]
        need_memory -= had[1] - has[1]


@inner
def _make_room(alloc: Allocation, demand: Demand, nodes: Array, jobs: Any, typ: int, servers: Any, shares: Any) -> bool:
    found = _victim_servers(alloc, demand, nodes, typ, servers, shares)
    for i in range(found):
        node = servers[i]
        cpu, memory = _entry_amount(demand, nodes, typ, DOWN, node, shares[i])
        _reclaim(
            alloc, demand, nodes, jobs, node, cpu - alloc.node[node].free_cpu, memory - alloc.node[node].free_memory
        )
    return found > 0


@inner
def _give_less(
    alloc: Allocation, demand: Demand, nodes: Array, jobs: Array, placement: int, job: int, tried: int, servers: Any,
    shares: Any,
) -> bool:  # fmt: skip
    """Place a job at level DOWN (the least CPU and memory) after it did not fit at level `tried`, and reduce the CPU
    and memory of other jobs to DOWN if necessary.
    """
    typ = jobs[job].type
    if (tried != IDEAL or demand.type[typ].can_shrink) and place(alloc, demand, nodes, placement, job, typ, DOWN):
        return True
    if _make_room(alloc, demand, nodes, jobs, typ, servers, shares) and place(
        alloc, demand, nodes, placement, job, typ, DOWN
    ):
        return True
    alloc.job[job].level = NOT_RUNNING
    return False


@inlined
def allot(
    alloc: Allocation, demand: Demand, nodes: Array, jobs: Array, allotment: int, placement: int, job: int,
    servers: Any, shares: Any,
) -> bool:  # fmt: skip
    """Place a job with the CPU and memory that the allotment gives it. False: the job must wait.

    `servers`, `shares`: working arrays with an element for each node.
    """
    level = IDEAL
    if allotment == A_PROPORTIONAL:
        level = PROPORTIONAL
    elif allotment >= A_OPTIMAL:
        level = jobs[job].wanted
    placed = place_inlined(alloc, demand, nodes, placement, job, jobs[job].type, level)
    if not placed and A_TUNE <= allotment <= A_OPTIMAL:
        placed = _give_less(alloc, demand, nodes, jobs, placement, job, level, servers, shares)
    return placed


@inner
def relevel(alloc: Allocation, demand: Demand, nodes: Array, job: int, typ: int, level: int) -> None:
    """Change the CPU and memory of a running job to another level on the GPUs that it has, if all its nodes have the
    CPU and memory for it.
    """
    old = alloc.job[job].level
    if old == level:
        return
    begin, end = alloc.job[job].first, alloc.job[job].first + alloc.job[job].count
    for e in range(begin, end):
        node = alloc.entry[e].node
        had = _entry_amount(demand, nodes, typ, old, node, alloc.entry[e].gpus)
        wants = _entry_amount(demand, nodes, typ, level, node, alloc.entry[e].gpus)
        if wants[0] - had[0] > alloc.node[node].free_cpu or wants[1] - had[1] > alloc.node[node].free_memory:
            return
    for e in range(begin, end):
        node = alloc.entry[e].node
        had = _entry_amount(demand, nodes, typ, old, node, alloc.entry[e].gpus)
        wants = _entry_amount(demand, nodes, typ, level, node, alloc.entry[e].gpus)
        alloc.node[node].free_cpu -= wants[0] - had[0]
        alloc.node[node].free_memory -= wants[1] - had[1]
        if wants[0] < had[0] or wants[1] < had[1]:
            lower_pointers(alloc, node)
    alloc.job[job].level = level
