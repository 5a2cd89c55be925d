"""The optimal allotment: CPU and memory for the jobs of a round by a mixed-integer program.

After Synergy (OSDI'22, section 4.1): maximise the sum of normalised throughputs over the jobs that the ordering
selects, limited only by the cluster's total CPU and memory, with no job below its proportional speed. Jobs of one
demand type are equal, so the program decides how many jobs of a type get each level (amount of CPU and memory): it has
tens of integer variables, whatever the number of jobs. Then jobs are placed as under `tune`: those that do not fit are
reduced.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cotenant.policy.jobs.arrays import DOWN, IDEAL, PROPORTIONAL, Array, Demand
from cotenant.policy.solver import solve_milp


class LevelChooser:
    """Chooses the level of CPU and memory of each job of a round. Caches solutions, since rounds repeat."""

    def __init__(self, demand: Demand, nodes: Array, time_limit_s: float) -> None:
        self.demand = demand
        self.cpu = float(nodes["cpu"].sum())
        self.memory = float(nodes["memory"].sum())
        self.time_limit_s = time_limit_s
        self.options = [self._pareto(t) for t in range(len(demand.type))]
        self.known: dict[bytes, list[Array]] = {}
        self.solves = 0
        self.hits = 0
        self.worst_gap = 0.0
        self.timeouts = 0

    def _reference(self, typ: Any) -> int:
        return int(np.argmax(self.demand.allowed[typ]))

    def _pareto(self, typ: int) -> Array:
        """Return the levels (amounts of CPU and memory) among which the program chooses for jobs of this type: those at
        which the jobs are at least as fast as at the proportional level, and level DOWN. A level is left out if another
        one that is at least as fast needs no more CPU and no more memory.
        """
        kind = self._reference(typ)
        speed = 1.0 / self.demand.amount["iteration_s"][:, typ, kind]
        cpu, memory = self.demand.amount["cpu"][:, typ, kind], self.demand.amount["memory"][:, typ, kind]
        candidates = [x for x in range(len(speed)) if speed[x] >= speed[PROPORTIONAL] * (1 - 1e-9)]
        kept: list[int] = []
        for x in sorted(candidates, key=lambda x: (-speed[x], cpu[x], memory[x], x != IDEAL)):
            if not any(cpu[y] <= cpu[x] and memory[y] <= memory[x] for y in kept):
                kept.append(x)
        if DOWN not in kept and not any(cpu[y] <= cpu[DOWN] and memory[y] <= memory[DOWN] for y in kept):
            kept.append(DOWN)  # level DOWN is always feasible, since the proportional shares of all jobs fit together
        return np.array(kept)

    def choose(self, selected: Array, jobs: Array) -> None:
        """Set `wanted`, the level of CPU and memory, of the selected jobs. Among jobs of one demand type, the first in
        order get the faster levels.
        """
        counts = np.bincount(jobs["type"][selected], minlength=len(self.demand.type))
        key = counts.astype(np.int32).tobytes()
        if key in self.known:
            self.hits += 1
        else:
            self.known[key] = self._solve(counts)
        queue = [list(levels) for levels in self.known[key]]
        for job in selected:
            levels = queue[jobs["type"][job]]
            jobs["wanted"][job] = levels.pop(0) if levels else DOWN

    def _solve(self, counts: Array) -> list[Array]:
        present = np.flatnonzero(counts)
        columns = [(t, level) for t in present for level in self.options[t]]
        cost, cpu, memory = (np.zeros(len(columns)) for _ in range(3))
        for i, (t, level) in enumerate(columns):
            kind = self._reference(t)
            pace = self.demand.amount["iteration_s"][:, t, kind]
            cost[i] = pace[PROPORTIONAL] / pace[level]
            cpu[i] = self.demand.amount["cpu"][level, t, kind] * self.demand.type["gpus"][t]
            memory[i] = self.demand.amount["memory"][level, t, kind] * self.demand.type["gpus"][t]
        n, m = len(columns), len(present) + 2
        a = np.zeros((m, n))
        for r, t in enumerate(present):
            a[r] = [1.0 if column[0] == t else 0.0 for column in columns]
        a[-2], a[-1] = cpu, memory
        lower = np.concatenate([counts[present].astype(float), [-np.inf, -np.inf]])
        upper = np.concatenate([counts[present].astype(float), [self.cpu, self.memory]])
        solution = solve_milp(
            cost, _compress(a), lower, upper, np.zeros(n),
            np.array([counts[t] for t, _ in columns], float), np.ones(n, np.bool_),
            maximise=True, time_limit_s=self.time_limit_s,
        )  # fmt: skip
        self.solves += 1
        levels: list[Array] = [np.zeros(0, np.int16) for _ in range(len(counts))]
        if solution.x is None:
            # the solver found no solution within its time limit, so all jobs get the smaller of their proportional and
            # their ideal amount, of CPU and of memory
            self.timeouts += 1
            for t in present:
                levels[t] = np.full(counts[t], DOWN, np.int16)
            return levels
        self.worst_gap = max(self.worst_gap, solution.gap)
        if solution.status != "optimal":
            self.timeouts += 1
        whole = np.round(solution.x).astype(int)
        order = np.argsort(-cost, kind="stable")
        for t in present:
            levels[t] = np.concatenate(
                [np.full(whole[i], columns[i][1], np.int16) for i in order if columns[i][0] == t]
            )
        return levels

    def summary(self) -> dict[str, Any]:
        """Return statistics of the solver: the numbers of solved integer programs, reused solutions and timeouts, and
        the largest gap.
        """
        return {"solves": self.solves, "reused": self.hits, "timed_out": self.timeouts, "worst_gap": self.worst_gap}


def _compress(a: Array) -> tuple[Array, Array, Array]:
    starts = np.concatenate([[0], np.cumsum((a != 0).sum(axis=1))]).astype(np.int32)
    rows, columns = np.nonzero(a)
    return starts, columns.astype(np.int32), a[rows, columns]
