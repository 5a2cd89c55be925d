"""Placement: chooses the nodes and GPUs of a job. PLACEMENTS is the registry; the code is compiled.

Every function works on an Allocation (policy.jobs.arrays), and leaves it unchanged if it returns False.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cotenant.policy.compiled import inlined, inner
from cotenant.policy.jobs.arrays import NONE, ONE, Allocation, Array, Demand

PLACEMENTS: dict[str, tuple[int, str]] = {
    "first-fit": (0, "the first nodes with free GPUs; a gang may span nodes"),
    "consolidate": (1, "the fullest node that has enough GPUs for the whole gang, otherwise the fullest nodes first"),
    "spread": (2, "one GPU at a time on the emptiest node that fits"),
}
FIRST_FIT, CONSOLIDATE, SPREAD = 0, 1, 2
# placement of elastic policies: like `consolidate`, but a job (gang) that fits on no single node takes whole nodes
FEWEST_NODES: Any = np.int64(3)


@inner
def clear(alloc: Allocation, nodes: Array) -> None:
    """Free all GPUs and remove all entries, the records of which job runs on which node. The caller resets the arrays
    of jobs (first, count, level).
    """
    n = len(nodes)
    alloc.free_kind[:] = 0
    alloc.bucket[:] = 0
    for i in range(n):
        alloc.node[i].free_gpus = nodes[i].gpus
        alloc.node[i].free_cpu = nodes[i].cpu
        alloc.node[i].free_memory = nodes[i].memory
        alloc.node[i].head = -1
        alloc.free_kind[nodes[i].kind] += nodes[i].gpus
        alloc.bucket[nodes[i].gpus, i >> 6] |= np.uint64(1) << np.uint64(i & 63)
    for i in range(n, 64 * alloc.bucket.shape[1]):
        # the bitmaps have bits for more nodes than exist; the surplus nodes count as nodes without a free GPU, so that
        # no search finds them
        alloc.bucket[0, i >> 6] |= np.uint64(1) << np.uint64(i & 63)
    alloc.slots[:] = -1
    alloc.used[0] = 0
    alloc.used[1] = alloc.free_kind.sum()
    alloc.pointer[:] = 0


@inner
def lower_pointers(alloc: Allocation, node: int) -> None:
    """Lower the pointers (Allocation.pointer) after CPU, memory or GPUs of a node became free, so that no search begins
    after this node."""
    for level in range(alloc.pointer.shape[0]):
        for typ in range(alloc.pointer.shape[1]):
            if alloc.pointer[level, typ] > node:
                alloc.pointer[level, typ] = node


@inlined
def _set_free(alloc: Allocation, nodes: Array, node: int, free: int) -> None:
    bit = np.uint64(1) << np.uint64(node & 63)
    change = free - alloc.node[node].free_gpus
    alloc.bucket[alloc.node[node].free_gpus, node >> 6] &= ~bit
    alloc.bucket[free, node >> 6] |= bit
    alloc.node[node].free_gpus = free
    alloc.used[1] += change
    alloc.free_kind[nodes[node].kind] += change


@inner
def lowest_bit(word: int) -> int:
    """Return the index of the lowest set bit of a non-zero 64-bit word."""
    n = 0
    w = np.uint64(word)
    for half in (32, 16, 8, 4, 2, 1):
        if w & ((np.uint64(1) << np.uint64(half)) - np.uint64(1)) == np.uint64(0):
            n += half
            w >>= np.uint64(half)
    return n


@inlined
def fits(alloc: Allocation, demand: Demand, nodes: Array, node: int, typ: int, level: int) -> int:
    """Return how many GPUs the node can give to one job of this type now, at most as many as the job needs; for a job
    on a fraction of a GPU, 1 if the node has space for it, otherwise 0.
    """
    kind = nodes[node].kind
    if not demand.allowed[typ, kind]:
        return 0
    most = alloc.node[node].free_gpus
    part = demand.type[typ].part_milli
    if part > 0:
        if most == 0:
            found = False
            for s in range(alloc.slots.shape[1]):
                if alloc.slots[node, s] >= part:
                    found = True
                    break
            if not found:
                return 0
        most = 1
    elif most == 0:
        return 0
    if most > demand.type[typ].gpus:
        most = demand.type[typ].gpus
    cpu = demand.amount[level, typ, kind].cpu
    memory = demand.amount[level, typ, kind].memory
    if cpu * most > alloc.node[node].free_cpu:
        most = alloc.node[node].free_cpu // cpu
    if memory * most > alloc.node[node].free_memory:
        most = alloc.node[node].free_memory // memory
    return max(most, 0)


@inlined
def _enter(
    alloc: Allocation, demand: Demand, nodes: Array, job: int, typ: int, level: int, node: int, gpus: int, slot: int
) -> None:
    """Take the job's CPU and memory on the node, and write the entry that records it. The caller has already taken the
    GPUs.
    """
    kind = nodes[node].kind
    alloc.node[node].free_cpu -= demand.amount[level, typ, kind].cpu * gpus
    alloc.node[node].free_memory -= demand.amount[level, typ, kind].memory * gpus
    e = alloc.used[0]
    alloc.used[0] += 1
    alloc.entry[e].node = node
    alloc.entry[e].gpus = gpus
    alloc.entry[e].job = job
    alloc.entry[e].slot = slot
    alloc.entry[e].next = alloc.node[node].head
    alloc.node[node].head = e
    alloc.job[job].count += 1


def _take(
    alloc: Allocation, demand: Demand, nodes: Array, job: int, typ: int, level: int, node: int, gpus: int
) -> None:
    """Give the job `gpus` of the node's GPUs, or its fraction of one, as a new entry, the record of the job's part of
    the node.
    """
    slot = NONE
    part = demand.type[typ].part_milli
    if part > 0:
        # use the GPU that fractions already use and that has the least sufficient space; if there is none, a free GPU
        best = 2000
        unused = NONE
        for s in range(alloc.slots.shape[1]):
            room = alloc.slots[node, s]
            if room < 0:
                if unused < 0:
                    unused = s
            elif part <= room < best:
                best = room
                slot = s
        if slot < 0:
            slot = unused
            _set_free(alloc, nodes, node, alloc.node[node].free_gpus - 1)
            alloc.slots[node, slot] = 1000
        alloc.slots[node, slot] -= part
    else:
        _set_free(alloc, nodes, node, alloc.node[node].free_gpus - gpus)
    _enter(alloc, demand, nodes, job, typ, level, node, gpus, slot)


take: Any = inner(_take)
take_inlined: Any = inlined(_take)


@inner
def retake(
    alloc: Allocation, demand: Demand, nodes: Array, job: int, typ: int, level: int, node: int, gpus: int, slot: int
) -> None:
    """Give a job exactly the GPUs that it had before. A job on a fraction of a GPU stays in its slot. A job that now
    has a fraction instead of a whole GPU opens a slot (a GPU used in fractions), and one that now has the whole GPU
    closes its slot.
    """
    if demand.type[typ].part_milli == 0:
        take(alloc, demand, nodes, job, typ, level, node, gpus)
        return
    if slot < 0:
        slot = alloc.slots.shape[1] - ONE
        while alloc.slots[node, slot] >= 0:
            slot -= ONE
    if alloc.slots[node, slot] < 0:
        _set_free(alloc, nodes, node, alloc.node[node].free_gpus - 1)
        alloc.slots[node, slot] = 1000
    alloc.slots[node, slot] -= demand.type[typ].part_milli
    _enter(alloc, demand, nodes, job, typ, level, node, ONE, slot)


@inner
def join(alloc: Allocation, demand: Demand, nodes: Array, job: int, typ: int, level: int, host: int) -> bool:
    """Give the job a fraction of the GPU of which `host` has a fraction. False: `host` is not placed, or there is not
    enough space.
    """
    alloc.job[job].first = alloc.used[0]
    alloc.job[job].count = 0
    if alloc.job[host].level < 0:
        return False
    at = alloc.entry[alloc.job[host].first]
    node, slot, part = at.node, at.slot, demand.type[typ].part_milli
    if slot < 0 or part == 0 or alloc.slots[node, slot] < part:
        return False
    amount = demand.amount[level, typ, nodes[node].kind]
    if amount.cpu > alloc.node[node].free_cpu or amount.memory > alloc.node[node].free_memory:
        return False
    alloc.slots[node, slot] -= part
    _enter(alloc, demand, nodes, job, typ, level, node, ONE, slot)
    alloc.job[job].level = level
    return True


@inner
def undo(alloc: Allocation, demand: Demand, nodes: Array, job: int, typ: int, level: int) -> None:
    """Take back the entries (parts of a job on nodes) that the job has just got; they are the newest of all."""
    for e in range(alloc.used[0] - 1, alloc.job[job].first - 1, -1):
        node = alloc.entry[e].node
        kind = nodes[node].kind
        gpus = alloc.entry[e].gpus
        alloc.node[node].free_cpu += demand.amount[level, typ, kind].cpu * gpus
        alloc.node[node].free_memory += demand.amount[level, typ, kind].memory * gpus
        alloc.node[node].head = alloc.entry[e].next
        slot = alloc.entry[e].slot
        if slot >= 0:
            alloc.slots[node, slot] += demand.type[typ].part_milli
            if alloc.slots[node, slot] == 1000:
                alloc.slots[node, slot] = -1
                _set_free(alloc, nodes, node, alloc.node[node].free_gpus + 1)
        else:
            _set_free(alloc, nodes, node, alloc.node[node].free_gpus + gpus)
    alloc.used[0] = alloc.job[job].first
    alloc.job[job].count = 0


@inner
def _first_fit_part(alloc: Allocation, demand: Demand, nodes: Array, job: int, typ: int, level: int) -> int:
    """Place a job that needs a fraction of a GPU on the first node with space for it. It may share a GPU that is in
    use.
    """
    for node in range(alloc.pointer[level, typ], len(nodes)):
        alloc.pointer[level, typ] = node
        if fits(alloc, demand, nodes, node, typ, level) > 0:
            take(alloc, demand, nodes, job, typ, level, node, ONE)
            return 0
    alloc.pointer[level, typ] = len(nodes)
    return 1


@inlined
def _first_fit(alloc: Allocation, demand: Demand, nodes: Array, job: int, typ: int, level: int) -> int:
    left = demand.type[typ].gpus
    # whether all nodes before this one lack GPUs for this type; then the search for the next job of the type can start
    # here
    leading = True
    start = alloc.pointer[level, typ]
    w = start >> 6
    # 64 nodes are skipped at once if none of them has a free GPU; bucket 0 is the bit set of the nodes without one
    word = ~alloc.bucket[0, w] & (~np.uint64(0) << np.uint64(start & 63))
    while left > 0:
        while word == np.uint64(0):
            w += 1
            if w == alloc.bucket.shape[1]:
                break
            word = ~alloc.bucket[0, w]
        if word == np.uint64(0):
            break
        node = (w << 6) + lowest_bit(word)
        word &= word - np.uint64(1)
        k = fits(alloc, demand, nodes, node, typ, level)
        if k > 0:
            if leading:
                alloc.pointer[level, typ] = node
                leading = False
            k = min(k, left)
            take_inlined(alloc, demand, nodes, job, typ, level, node, k)
            left -= k
    if leading:
        alloc.pointer[level, typ] = len(nodes) - 1
    return left


@inner
def _nth_bucket(
    alloc: Allocation, demand: Demand, nodes: Array, typ: int, level: int, free: int, need: int, skip: int
) -> int:
    """Return the lowest number of a node after `skip` that has exactly `free` free GPUs and can give `need` of them,
    with their CPU and memory, to a job of this type and level; -1: there is none.
    """
    start = skip + 1
    for w in range(start >> 6, alloc.bucket.shape[1]):
        word = alloc.bucket[free, w]
        if w == start >> 6:
            word &= ~np.uint64(0) << np.uint64(start & 63)
        while word != np.uint64(0):
            node = (w << 6) + lowest_bit(word)
            # bits after the last node do not stand for any node
            if node < len(nodes) and fits(alloc, demand, nodes, node, typ, level) >= need:
                return node
            word &= word - np.uint64(1)
    return -1


@inner
def _consolidate(
    alloc: Allocation, demand: Demand, nodes: Array, code: int, job: int, typ: int, level: int
) -> int:  # fmt: skip
    g = demand.type[typ].gpus
    most = alloc.bucket.shape[0] - 1
    if g > 1 or code == FEWEST_NODES:
        for free in range(g, most + 1):
            node = _nth_bucket(alloc, demand, nodes, typ, level, free, g, NONE)
            if node >= 0:
                take(alloc, demand, nodes, job, typ, level, node, g)
                return 0
    left = g
    lowest = 0 if demand.type[typ].part_milli > 0 else 1
    for i in range(lowest, most + 1):
        free = i if code == CONSOLIDATE else most + lowest - i
        node = NONE
        while left > 0:
            node = _nth_bucket(alloc, demand, nodes, typ, level, free, ONE, node)
            if node < 0:
                break
            k = min(fits(alloc, demand, nodes, node, typ, level), left)
            take(alloc, demand, nodes, job, typ, level, node, k)
            left -= k
        if left == 0:
            break
    return left


@inner
def _spread(alloc: Allocation, demand: Demand, nodes: Array, job: int, typ: int, level: int) -> int:
    left = demand.type[typ].gpus
    most = alloc.bucket.shape[0] - 1
    lowest = 0 if demand.type[typ].part_milli > 0 else 1
    while left > 0:
        found = -1
        for free in range(most, lowest - 1, -1):
            found = _nth_bucket(alloc, demand, nodes, typ, level, free, ONE, NONE)
            if found >= 0:
                break
        if found < 0:
            break
        merged = False
        for e in range(alloc.job[job].first, alloc.used[0]):
            if alloc.entry[e].node == found:  # the job already has GPUs on this node, so its entry is extended
                kind = nodes[found].kind
                alloc.entry[e].gpus += 1
                alloc.node[found].free_cpu -= demand.amount[level, typ, kind].cpu
                alloc.node[found].free_memory -= demand.amount[level, typ, kind].memory
                _set_free(alloc, nodes, found, alloc.node[found].free_gpus - 1)
                merged = True
                break
        if not merged:
            take(alloc, demand, nodes, job, typ, level, found, ONE)
        left -= 1
    return left


def _place(alloc: Allocation, demand: Demand, nodes: Array, code: int, job: int, typ: int, level: int) -> bool:
    """Place all GPUs of a job (a gang) at that level of CPU and memory by placement `code`. Returns False, with nothing
    changed, if they do not fit.
    """
    alloc.job[job].first = alloc.used[0]
    alloc.job[job].count = 0
    if code == FIRST_FIT and demand.type[typ].part_milli > 0:
        left = _first_fit_part(alloc, demand, nodes, job, typ, level)
    elif code == FIRST_FIT:
        left = _first_fit(alloc, demand, nodes, job, typ, level)
    elif code == SPREAD:
        left = _spread(alloc, demand, nodes, job, typ, level)
    else:
        left = _consolidate(alloc, demand, nodes, code, job, typ, level)
    if left > 0:
        undo(alloc, demand, nodes, job, typ, level)
        return False
    alloc.job[job].level = level
    return True


place: Any = inner(_place)
place_inlined: Any = inlined(_place)
