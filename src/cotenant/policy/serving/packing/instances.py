"""Finds the fewest GPUs divided into MIG instances: an integer program over the contents of instances and the layouts
of GPUs.

A column is one instance with its contents and the requests/s that each service gets from it. Contents are one service
on one or several processes, two processes that each have a part of the instance's SMs (and may serve different
services), or several services that take turns in one process. A layout is a set of instances that fits one GPU. With x
instances of each column and y GPUs of each layout:

    minimise sum(y) such that
    for each service: sum over columns of (capacity * x) >= rate
    for each kind of instance: sum of x over its columns <= sum over layouts of (number of such instances * y)

Instances do not slow each other down, so columns are independent. The linear relaxation needs only the columns in which
no services take turns. Its optimum is nevertheless a bound for all plans: whatever price a request/s of each service
has, services that take turns never earn more than the best of them alone (see `patterns`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from cotenant.policy.serving.packing.adjust import pattern_caps
from cotenant.policy.serving.packing.kernel import State, Tables
from cotenant.policy.serving.packing.patterns import Pattern, pareto, patterns
from cotenant.policy.serving.packing.search import empty_all
from cotenant.policy.serving.packing.shared import undominated
from cotenant.policy.solver import Solution, compressed, solve_milp

PAIRED = 16  # for at most this many services, every pair of services is considered for taking turns on an instance
# for each instance and pair of services that take turns, this many trade-offs between their rates are considered
POINTS = 8
CYCLES = 32  # for larger sets of services, this many lengths of a cycle of turns are tried
SMALLEST = 12  # this many services with the least demand are tried in sets of three or more on one instance

# contents of a MIG instance, for each of its gpulets (parts): (partition, services, requests/s)
Content = tuple[tuple[int, tuple[int, ...], tuple[float, ...]], ...]


@dataclass(frozen=True)
class Column:
    """One MIG instance of a kind (index into the table's kinds), the requests/s that each service gets from it, and its
    gpulets (the parts that run one process each).
    """

    kind: int
    caps: np.ndarray  # (S,): requests/s of each service that the instance serves
    content: Content


class InstanceTable:
    """For GPUs that are divided into MIG instances: the layouts of a GPU, and which one or two services an instance can
    run. The table does not depend on the services' rates, so one table is used for all rates.
    """

    def __init__(self, T: Tables) -> None:
        self.T = T
        types = sorted(set(T.gpu_type.tolist()))
        self.kinds = [(t, k) for t in types for k in sorted(set(T.size["kind"][t][T.size["allowed"][t] > 0].tolist()))]
        self.layout_types: list[int] = []
        layouts = []
        for t in types:
            for layout in gpu_layouts(T, t):
                layouts.append([layout.get(k, 0) if u == t else 0 for u, k in self.kinds])
                self.layout_types.append(t)
        self.layouts = np.array(layouts)
        self.alone = [c for i in range(len(self.kinds)) for c in self._alone(i)]
        self.pairs = [x for i in range(len(self.kinds)) for x in self._pairs(i)] if len(T.svc) <= PAIRED else []

    def parts(self, i: int) -> list[int]:
        """Return the partitions (parts of an instance's SMs) into which an instance of kind i may be divided."""
        t, k = self.kinds[i]
        size = self.T.size[t]
        return np.nonzero((size["allowed"] > 0) & (size["kind"] == k))[0].tolist()

    def whole(self, i: int) -> int | None:
        """Return the partition that is the whole instance of kind i for one process, in which services may take turns;
        None if there is none."""
        size = self.T.size[self.kinds[i][0]]
        return next((p for p in self.parts(i) if size["share"][p] > 1 - 1e-9 and size["procs"][p] == 1), None)

    @property
    def bounds(self) -> bool:
        """Whether plans with one service on each gpulet (part of a GPU) give a bound on all plans. They do if no
        instance holds more than two gpulets.
        """
        allowed = self.T.size["allowed"] > 0
        return bool((self.T.size["share"][allowed] > 1 / 3 + 1e-9).all())

    def _alone(self, i: int) -> list[Column]:
        caps, what = patterns(self.T, self.kinds[i][0], self.parts(i))
        # a column can be replaced only by one with the same services
        alike: dict[tuple[int, ...], list[int]] = {}
        for c in range(len(caps)):
            if caps[c].any() and self._holds(i, what[c]):
                alike.setdefault(tuple(np.nonzero(caps[c])[0].tolist()), []).append(c)
        keep = [rows[int(x)] for rows in alike.values() for x in undominated(caps[rows])]
        return [Column(i, caps[c], self._content(i, what[c], caps[c])) for c in keep]

    def _content(self, i: int, what: Pattern, caps: np.ndarray) -> Content:
        if len(what) == 1:
            return tuple((p, (s,), (float(caps[s]),)) for p, s, _ in what)
        gpu = int(np.argmax(self.T.gpu_type == self.kinds[i][0]))
        each = pattern_caps(self.T, gpu, *(np.array(x, np.int64) for x in zip(*what, strict=True)))
        return tuple((p, (s,), (float(rps),)) for (p, s, _), rps in zip(what, each, strict=True))

    def _holds(self, i: int, what: Pattern) -> bool:
        size = self.T.size[self.kinds[i][0]]
        processes = [s for p, s, _ in what for _ in range(size["procs"][p])]
        return self._memory_fits(i, processes, len(processes))

    def _memory_fits(self, i: int, services: Sequence[int], gpulets: int) -> bool:
        t = self.kinds[i][0]
        row, slots = self.T.gpu[t], self.T.size["slots"][t, self.parts(i)[0]]
        used = float(self.T.svc["mem"][list(services)].sum()) + gpulets * float(row["mem_let"])
        return used <= float(row["mem_gpu"]) * int(slots) / int(row["slots"])

    def _ms(self, i: int, p: int) -> np.ndarray:
        """Return (S, B+1): milliseconds of each service's batch alone on a partition; inf if it was not profiled, and
        for a batch of 0.
        """
        t = self.kinds[i][0]
        model = self.T.svc["model"]
        ms: np.ndarray = (self.T.lat[t, model, p] + self.T.cell["over"][t, model]) * self.T.gpu["margin"][t]
        ms[:, 0] = np.inf
        return ms

    def _may_share(self, i: int, services: tuple[int, ...]) -> bool:
        return len(set(self.T.svc["group"][list(services)].tolist())) == 1 and self._memory_fits(i, services, 1)

    def _pairs(self, i: int) -> list[tuple[int, int, tuple[int, int], np.ndarray]]:
        """Return, for each two services that can take turns on an instance of kind i: the kind, the partition, the
        services, and the pairs of requests/s that they can reach and that no other pair exceeds in both.
        """
        p, out = self.whole(i), []
        if p is None or self.T.seats < 2:
            return []
        ms, slo = self._ms(i, p), self.T.svc["slo"]
        for a, b in combinations(range(len(slo)), 2):
            limit = min(slo[a], slo[b]) / 2
            x, y = np.nonzero(ms[a] < limit)[0], np.nonzero(ms[b] < limit)[0]
            if not x.size or not y.size or not self._may_share(i, (a, b)):
                continue
            work = ms[a][x][:, None] + ms[b][y][None, :]
            rates = np.stack([(x[:, None] * 1000 / work).ravel(), (y[None, :] * 1000 / work).ravel()], axis=1)
            rates = rates[(work <= limit).ravel()]
            if len(rates):
                out.append((i, p, (a, b), rates[pareto(rates)]))
        return out

    def sharing(self, rates: np.ndarray) -> list[Column]:
        """Return columns (instances with contents) whose services take turns, for these request rates."""
        out = []
        for i, p, (a, b), points in self.pairs:
            capped = np.minimum(points, rates[[a, b]])
            capped = capped[pareto(capped)]
            for at in np.unique(np.linspace(0, len(capped) - 1, POINTS).round().astype(int)):
                caps = np.zeros(len(rates))
                caps[[a, b]] = capped[at]
                out.append(Column(i, caps, ((p, (a, b), tuple(capped[at].tolist())),)))
        for wanted in (rates, self._remainders(rates)):
            done: set[tuple[int, tuple[int, ...]]] = set()
            for i in sorted(range(len(self.kinds)), key=self._fraction):
                for p, services in self._sets(i, wanted):
                    if (self.kinds[i][0], services) in done:
                        # a smaller instance of the same GPU type already has a column for these services
                        continue
                    done.add((self.kinds[i][0], services))
                    caps = np.zeros(len(rates))
                    caps[list(services)] = wanted[list(services)]
                    out.append(Column(i, caps, ((p, services, tuple(caps[list(services)].tolist())),)))
        return out

    def _remainders(self, rates: np.ndarray) -> np.ndarray:
        """Return (S,): what remains of each service's rate if the service fills instances of its own, of the cheapest
        kind, completely.
        """
        best = np.zeros(len(rates))
        cost = np.full(len(rates), np.inf)
        for column in self.alone:
            for s in np.nonzero(column.caps)[0] if len(column.content) == 1 else ():
                each = self._fraction(column.kind) / column.caps[s]
                if each < cost[s]:
                    cost[s], best[s] = each, column.caps[s]
        left = np.where(best > 0, rates % np.maximum(best, 1e-9), rates)
        return np.where(left > 1e-6 * rates, left, rates)

    def _fraction(self, i: int) -> float:
        return float(self.T.size["whole"][self.kinds[i][0], self.parts(i)[0]])

    def _sets(self, i: int, rates: np.ndarray) -> list[tuple[int, tuple[int, ...]]]:
        """Return (partition, services) for sets of services that can take turns on one instance of kind i, so that the
        instance serves the whole request rate of each of them.
        """
        p = self.whole(i)
        if p is None:
            return []
        ms, slo = self._ms(i, p), self.T.svc["slo"]
        small = set(np.argsort(rates * self.T.svc["cost"], kind="stable")[:SMALLEST].tolist())
        cycle = np.geomspace(slo.max() / 2000, slo.max() / 2, CYCLES)
        batch = np.maximum(1, np.ceil(rates[:, None] * cycle[None, :] / 1000 - 1e-9)).astype(np.int64)
        within = batch < ms.shape[1]
        work = np.where(within, np.take_along_axis(ms, np.where(within, batch, 0), axis=1), np.inf)
        late = cycle[None, :] > slo[:, None] / 2
        work[late] = np.inf
        fits = [s for s in range(len(rates)) if (work[s] <= cycle).any()]
        return [
            (p, services) for n in range(2, self.T.seats + 1)
            for services in combinations(fits if n == 2 else [s for s in fits if s in small], n)
            if (work[list(services)].sum(axis=0) <= cycle).any() and self._may_share(i, services)
        ]  # fmt: skip

    def factor(self, rates: np.ndarray, counts: np.ndarray) -> float:
        """Return an upper bound, from the linear relaxation, on the factor by which all rates can be multiplied so that
        `counts` GPUs of each type still serve them."""
        rows, low, high = self._rows(self.alone, np.zeros(len(rates)), counts)
        rows = np.hstack([rows, np.concatenate([-rates, np.zeros(len(rows) - len(rates))])[:, None]])
        cost = np.zeros(rows.shape[1])
        cost[-1] = 1.0
        found = self._solve(cost, rows, low, high, whole=False, maximise=True, time_limit_s=10.0)
        return np.inf if found.x is None else float(found.objective)

    def fewest(
        self, rates: np.ndarray, counts: np.ndarray, time_limit_s: float
    ) -> tuple[list[Column], np.ndarray] | None:
        """Return columns, one for each MIG instance, and the number of GPUs of each layout, for the fewest GPUs found;
        None if no plan was found.
        """
        least = self._integer(self.alone, rates, counts, time_limit_s, relaxed=True)
        if least is None:
            return None
        best = self._integer(self.alone, rates, counts, time_limit_s)
        if self.T.seats > 1 and (best is None or best.objective > np.ceil(least.objective - 1e-6) + 0.5):
            columns = self.alone + self.sharing(rates)
            wider = self._integer(columns, rates, counts, time_limit_s)
            if wider is not None and (best is None or wider.objective < best.objective - 0.5):
                return self._chosen(columns, wider)
        return None if best is None else self._chosen(self.alone, best)

    def fill(self, columns: list[Column], times: np.ndarray, rates: np.ndarray, out: State) -> None:
        """Write chosen instances into a packing state: GPUs by layout, and on each instance the services' rates in
        proportion to what it can serve.
        """
        total = np.sum([c.caps for c in columns], axis=0)
        waiting = {kind: [c for c in columns if c.kind == kind] for kind in range(len(self.kinds))}
        free = {t: np.nonzero(self.T.gpu_type == t)[0].tolist() for t in set(self.layout_types)}
        empty_all(out)
        for layout, of_type, n in zip(self.layouts, self.layout_types, times.tolist(), strict=True):
            for _ in range(n):
                g = free[of_type].pop(0)
                kinds = [kind for kind, count in enumerate(layout.tolist()) for _ in range(count)]
                held = [waiting[kind].pop() for kind in kinds if waiting[kind]]
                lets = [(inst, let) for inst, column in enumerate(held) for let in column.content]
                for j, (inst, (p, services, rps)) in enumerate(lets):
                    row = out[g, j]
                    row["part"], row["inst"], row["count"] = p, inst, len(services)
                    row["svc"][: len(services)] = services
                    for k, s in enumerate(services):
                        row["rate"][k] = rps[k] * min(1.0, rates[s] / total[s])

    def _chosen(self, columns: list[Column], found: Solution) -> tuple[list[Column], np.ndarray]:
        assert found.x is not None
        times = np.round(found.x).astype(np.int64)
        return [c for c, n in zip(columns, times, strict=False) for _ in range(n)], times[len(columns) :]

    def _integer(
        self, columns: list[Column], rates: np.ndarray, counts: np.ndarray, time_limit_s: float, relaxed: bool = False
    ) -> Solution | None:
        rows, low, high = self._rows(columns, rates, counts)
        cost = np.concatenate([np.zeros(len(columns)), np.ones(len(self.layouts))])
        found = self._solve(cost, rows, low, high, whole=not relaxed, time_limit_s=time_limit_s)
        return None if found.x is None else found

    def _rows(
        self, columns: list[Column], rates: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the constraints of the integer program as a matrix and the lower and upper limits of its rows. The
        rows are: the rate of each service, the instances of each kind, the GPUs of each type. The variables are: the
        number of instances of each column, then the number of GPUs of each layout.
        """
        n, S, K = len(columns), len(rates), len(self.kinds)
        rows = np.zeros((S + K + len(counts), n + len(self.layouts)))
        for c, column in enumerate(columns):
            rows[:S, c] = column.caps
            rows[S + column.kind, c] = 1.0
        rows[S : S + K, n:] = -self.layouts.T
        rows[S + K + np.array(self.layout_types), n + np.arange(len(self.layouts))] = 1.0
        low = np.concatenate([rates, np.full(K + len(counts), -np.inf)])
        high = np.concatenate([np.full(S, np.inf), np.zeros(K), counts.astype(float)])
        return rows, low, high

    def _solve(
        self, cost: np.ndarray, rows: np.ndarray, low: np.ndarray, high: np.ndarray, *, whole: bool,
        time_limit_s: float, maximise: bool = False,
    ) -> Solution:  # fmt: skip
        n = rows.shape[1]
        return solve_milp(
            cost, compressed(rows), low, high, np.zeros(n), np.full(n, np.inf), np.full(n, whole), maximise=maximise,
            time_limit_s=time_limit_s,
        )  # fmt: skip


def gpu_layouts(T: Tables, t: int) -> list[dict[int, int]]:
    """Return the maximal sets of instances of one GPU of type t, as counts by kind."""
    rows = {int(r["kind"]): r for r in T.size[t] if r["allowed"]}
    kinds = sorted(rows, key=lambda k: -rows[k]["slots"])
    found: list[dict[int, int]] = []

    def grow(layout: dict[int, int], slots: int, compute: int, whole: float, first: int) -> None:
        full = True
        for at, kind in enumerate(kinds):
            row = rows[kind]
            if row["slots"] > slots or row["compute"] > compute or row["whole"] > whole + 1e-9:
                continue
            full = False
            if at >= first:
                wider = layout | {kind: layout.get(kind, 0) + 1}
                grow(wider, slots - row["slots"], compute - row["compute"], whole - row["whole"], at)
        if full:
            found.append(layout)

    grow({}, int(T.gpu["slots"][t]), int(T.gpu["compute"][t]), 1.0, 0)
    return found
