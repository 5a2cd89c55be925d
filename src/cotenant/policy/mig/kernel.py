"""The compiled core of the MIG optimizer: the exact best assignment of up to seven jobs to instances.

The legal sets of instances form a lattice: a set of n instances is a set of n-1 instances plus one. Giving the jobs
their instances one after the other therefore walks that lattice, and `best[set] = min over p in set of best[set - p] +
cost[n-1, p]` is exact: job n-1 is the one that got p. A GPU of seven slices has 298 sets (723 with the 1g instance of
double memory), so seven jobs take a few thousand steps; trying every permutation would take hundreds of thousands.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from cotenant.core.mig import Geometry, Layout, Placement, legal_layouts
from cotenant.policy.compiled import jit


class Lattice(NamedTuple):
    """Legal sets of instances as arrays. Sets are sorted by size; `level[n]:level[n + 1]` are those of n instances.

    `parent[s, i]` and `place[s, i]` (i < size): the set without its i-th instance, and that instance's index in
    `placements`. `kind[p]`: index of placement p's kind in the geometry's kinds; `slots[p]`: memory slots it takes.
    """

    placements: tuple[Placement, ...]
    sets: tuple[Layout, ...]
    level: np.ndarray
    parent: np.ndarray
    place: np.ndarray
    kind: np.ndarray
    slots: np.ndarray
    number: dict[Placement, int]


@cache
def lattice(geo: Geometry) -> Lattice:
    """Return the lattice of the legal sets of instances of a GPU model; it is built once per model."""
    placements = geo.placements()
    sets = legal_layouts(geo)
    position = {s: i for i, s in enumerate(sets)}
    index = {p: i for i, p in enumerate(placements)}
    widest = max(len(s) for s in sets)
    parent = np.full((len(sets), widest), -1, np.int32)
    place = np.full((len(sets), widest), -1, np.int32)
    for s, layout in enumerate(sets):
        for i, placement in enumerate(layout):
            parent[s, i] = position[tuple(p for p in layout if p != placement)]
            place[s, i] = index[placement]
    level = np.searchsorted([len(s) for s in sets], np.arange(widest + 2)).astype(np.int32)
    kind = np.array([geo.kinds.index(p.kind) for p in placements], np.int32)
    slots = np.array([geo.profiles[p.kind].memory_slots for p in placements], np.float64)
    return Lattice(placements, sets, level, parent, place, kind, slots, index)


@jit
def charge_moves(cost: np.ndarray, sits: np.ndarray, stop: np.ndarray, throughput: bool) -> None:
    """Add the downtime of a move to the cost of every placement, except the one that the job has now.

    sits: index of each job's present placement; -1: it has none, so it does not move. stop: fraction of the horizon for
    which a move stops each job. throughput: the costs are negative speeds, which get closer to 0; otherwise they are
    1/speed, which gets larger.
    """
    for j in range(cost.shape[0]):
        if sits[j] < 0:
            continue
        keep = 1.0 - min(stop[j], 0.999)
        for p in range(cost.shape[1]):
            if p != sits[j]:
                cost[j, p] = cost[j, p] * keep if throughput else cost[j, p] / keep


@jit
def assign(cost: np.ndarray, level: np.ndarray, parent: np.ndarray, place: np.ndarray, out: np.ndarray) -> float:
    """Fill `out[job]` with the placements of the cheapest assignment and return its cost; inf if there is none.

    cost: (jobs, placements) float64, inf where the job may not run. Among equal costs the first found is kept.
    """
    jobs = cost.shape[0]
    if jobs == 0:
        return 0.0
    if jobs + 1 >= level.shape[0]:
        return np.inf
    last = level[jobs + 1]
    best = np.full(last, np.inf)
    via = np.full(last, -1, np.int32)
    best[0] = 0.0
    for n in range(1, jobs + 1):
        for s in range(level[n], level[n + 1]):
            for i in range(n):
                value = best[parent[s, i]] + cost[n - 1, place[s, i]]
                if value < best[s] - 1e-12:
                    best[s] = value
                    via[s] = i
    top = int(level[jobs])
    for s in range(level[jobs], last):
        if best[s] < best[top] - 1e-12:
            top = s
    total = best[top]
    if total == np.inf:
        return np.inf
    node = int(top)
    for n in range(jobs, 0, -1):
        i = int(via[node])
        out[n - 1] = place[node, i]
        node = int(parent[node, i])
    return float(total)


@jit
def harm_of_joining(
    cost: np.ndarray,
    tenants: np.ndarray,
    counts: np.ndarray,
    job: int,
    level: np.ndarray,
    parent: np.ndarray,
    place: np.ndarray,
) -> np.ndarray:
    """Return for each GPU by how much the best total cost grows when `job` is added to its jobs; inf if they do not fit
    together.

    cost: shape (all jobs, placements). tenants: shape (GPUs, 7), the rows of `cost` of each GPU's jobs, of which the
    first `counts` are used. `job` is placed last, so the best total without it is known from the step before.
    """
    gpus = tenants.shape[0]
    out = np.full(gpus, np.inf)
    best = np.empty(level[-1])
    for g in range(gpus):
        jobs = counts[g] + 1
        if jobs + 1 >= level.shape[0]:
            continue
        best[: level[jobs + 1]] = np.inf
        best[0] = 0.0
        for n in range(1, jobs + 1):
            row = job if n == jobs else tenants[g, n - 1]
            for s in range(level[n], level[n + 1]):
                for i in range(n):
                    value = best[parent[s, i]] + cost[row, place[s, i]]
                    if value < best[s]:
                        best[s] = value
        before, after = best[level[jobs - 1] : level[jobs]].min(), best[level[jobs] : level[jobs + 1]].min()
        if after < np.inf:
            out[g] = after - before
    return out
