"""What jobs hold at the time of a decision, entered into the arrays of the compiled functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cotenant.core.plan import Grant
from cotenant.policy.jobs.arrays import AMOUNT, DOWN, JOB, TYPE, Allocation, Array, Demand
from cotenant.policy.jobs.demand import MB, Workload
from cotenant.policy.jobs.ordering import HELD_PRIORITY

#: allotments that may reduce a job that runs to level DOWN
CAN_REDUCE = ("tune", "optimal")


def without(nodes: Array, held: Sequence[Grant]) -> Array:
    """Return the nodes without the CPU, the memory and the whole GPUs of `held`."""
    left = nodes.copy()
    for grant in held:
        for node, gpus, cpus, memory in zip(
            grant.nodes, grant.node_gpus, grant.node_cpus, grant.node_memory, strict=True
        ):
            taken = (0 if 0 < gpus < 1 else round(gpus), math.ceil(cpus * 1000 - 1e-6), -(-memory // MB))
            for name, amount in zip(("gpus", "cpu", "memory"), taken, strict=True):
                left[name][node] = max(0, int(left[name][node]) - amount)
    return left


def with_parts(demand: Demand, jobs: Array, held: Sequence[Grant]) -> tuple[Demand, Array]:
    """Return the tables with a type and a job more for each part of a GPU in `held`. Such a job needs no CPU and no
    memory, and precedes all others in every order.
    """
    parts = [round(grant.node_gpus[0] * 1000) for grant in held]
    sizes, of = np.unique(np.array(parts, np.int64), return_inverse=True)
    types = np.zeros(len(sizes), TYPE)
    types["gpus"], types["part_milli"], types["multi_node_factor"] = 1, sizes, 1.0
    levels, _, kinds = demand.amount.shape
    amount = np.zeros((levels, len(sizes), kinds), AMOUNT)
    amount["iteration_s"] = 1.0
    more = np.zeros(len(held), JOB)
    more["type"], more["rank"] = len(demand.type) + of.reshape(-1), HELD_PRIORITY
    longer = Demand(
        np.concatenate([demand.type, types]),
        np.concatenate([demand.allowed, np.ones((len(sizes), kinds), np.bool_)]),
        np.concatenate([demand.amount, amount], axis=1),
    )
    return longer, np.concatenate([jobs, more])


def adopt(
    alloc: Allocation, work: Workload, nodes: Array, running: Sequence[tuple[int, Grant]], parts: Sequence[Grant],
    allotment: str, must_stay: Array,
) -> None:  # fmt: skip
    """Enter the grants of jobs (by row) as if the policy had decided them, so that it may leave the jobs on their GPUs.

    `nodes`: what is left there for these jobs, and for the holders of `parts` of GPUs. If the cluster has changed, a
    level may stand for other amounts than the job holds, and the amounts of a node's jobs may be more than the node
    has. Then the jobs on the node count as reduced to level DOWN, if the allotment reduces jobs. A job that does not
    fit even so counts as waiting. `must_stay[J]`: jobs that keep their GPUs, at level DOWN under any allotment.
    """
    running = sorted(running, key=lambda at: not must_stay[at[0]])
    room = _Room(work, nodes, parts)
    levels = [room.level(row, grant, allotment) for row, grant in running]
    if allotment in CAN_REDUCE:
        for (row, grant), level in zip(running, levels, strict=True):
            room.add(row, grant, level)
        over = room.overfull()
        for i, (_, grant) in enumerate(running):
            if not over.isdisjoint(grant.nodes):
                levels[i] = int(DOWN)
        room = _Room(work, nodes, parts)
    for (row, grant), level in zip(running, levels, strict=True):
        if not room.fits(row, grant, level) and must_stay[row]:
            level = int(DOWN)
        if room.fits(row, grant, level):
            room.add(row, grant, level)
            enter(alloc, row, grant, level)


def enter(alloc: Allocation, row: int, grant: Grant, level: int) -> None:
    """Enter the grant of the job in `row`, at a level of CPU and memory."""
    used = int(alloc.used[0])
    alloc.job["first"][row], alloc.job["count"][row] = used, len(grant.nodes)
    alloc.job["level"][row] = level
    for node, gpus in zip(grant.nodes, grant.node_gpus, strict=True):
        entry = alloc.entry[used]
        entry["node"], entry["gpus"], entry["job"] = node, 1 if gpus < 1 else round(gpus), row
        entry["slot"] = grant.slot
        used += 1
    alloc.used[0] = used


class _Room:
    """The GPUs, CPU and memory that are left on the nodes, and the amounts of jobs at their levels."""

    def __init__(self, work: Workload, nodes: Array, parts: Sequence[Grant]) -> None:
        self.left = [nodes[name].tolist() for name in ("gpus", "cpu", "memory")]
        self.parts: dict[tuple[int, int], int] = {}  # thousandths of a GPU that are given, by node and slot
        for grant in parts:
            key = (grant.nodes[0], grant.slot)
            self.left[0][key[0]] -= key not in self.parts
            self.parts[key] = self.parts.get(key, 0) + round(grant.node_gpus[0] * 1000)
        self._type, self._kind = work.type.tolist(), work.nodes["kind"].tolist()
        self._cpu, self._memory = (work.demand.amount[name].tolist() for name in ("cpu", "memory"))

    def level(self, row: int, grant: Grant, allotment: str) -> int:
        """The level that stands for the amounts that a job holds: the grant's own, if it still does. If none does, the
        level at which a job of the allotment is sure to fit, or at which alone it may run.
        """
        held = [
            (round(cpus * 1000), memory // MB)
            for cpus, memory in zip(grant.node_cpus, grant.node_memory, strict=True)
        ]
        levels = range(len(self._cpu))
        if grant.level in levels and self._amounts(row, grant, grant.level) == held:
            return grant.level
        lowest = int(DOWN) if allotment in CAN_REDUCE else min(grant.level, int(DOWN))
        return next((level for level in levels if self._amounts(row, grant, level) == held), lowest)

    def _amounts(self, row: int, grant: Grant, level: int) -> list[tuple[int, int]]:
        """The thousandths of a core and the MB that the job has at a level on each of its nodes."""
        typ, found = self._type[row], []
        for node, gpus in zip(grant.nodes, grant.node_gpus, strict=True):
            n, kind = 1 if gpus < 1 else round(gpus), self._kind[node]
            found.append((self._cpu[level][typ][kind] * n, self._memory[level][typ][kind] * n))
        return found

    def _needs(self, row: int, grant: Grant, level: int) -> list[tuple[int, tuple[int, int, int]]]:
        shared = grant.node_gpus[0] < 1 and (grant.nodes[0], grant.slot) in self.parts
        gpus = [0 if shared else 1] if grant.node_gpus[0] < 1 else [round(gpus) for gpus in grant.node_gpus]
        rows = zip(grant.nodes, gpus, self._amounts(row, grant, level), strict=True)
        return [(node, (n, cpu, memory)) for node, n, (cpu, memory) in rows]

    def add(self, row: int, grant: Grant, level: int) -> None:
        """Take what the job has at a level."""
        for node, needs in self._needs(row, grant, level):
            for left, need in zip(self.left, needs, strict=True):
                left[node] -= need
        if grant.node_gpus[0] < 1:
            key = (grant.nodes[0], grant.slot)
            self.parts[key] = self.parts.get(key, 0) + round(grant.node_gpus[0] * 1000)

    def fits(self, row: int, grant: Grant, level: int) -> bool:
        """Whether everything is there that the job has at a level."""
        part = round(grant.node_gpus[0] * 1000) if grant.node_gpus[0] < 1 else 0
        if self.parts.get((grant.nodes[0], grant.slot), 0) + part > 1000:
            return False
        return all(
            left[node] >= need
            for node, needs in self._needs(row, grant, level)
            for left, need in zip(self.left, needs, strict=True)
        )

    def overfull(self) -> set[int]:
        """The nodes of which more CPU or memory is taken than they have."""
        return {node for left in self.left[1:] for node, free in enumerate(left) if free < 0}
