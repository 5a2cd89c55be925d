"""All GPU patterns whose gpulets may be shared by several models, and an exact search over them. A *pattern* divides
one GPU into gpulets, its parts.

The models on a gpulet take turns in a cycle; a *batch vector* has each model's batch in it, and its *work* is the
length of the cycle. Two cycles must fit into the SLO of each model (`2 * work <= SLO`), so few batch vectors are
possible, and all can be listed: each vector on each partition, alone on the GPU and beside each vector on another
partition, under the interference that the two cause for each other. Patterns are left out if another one serves at
least as much of every service.

The search is depth-first over GPUs. At each node of the search tree, prices for requests bound what the remaining GPUs
can serve. The capacities of the patterns are first limited to the remaining rates, since more is worth nothing; this
makes the bound sharper than with the full capacities.

A pattern earns the sum of its capacities times their prices. The prices are scaled so that all remaining GPUs together
earn at most 1, if each has the best pattern of its type. Let V be the value of the remaining rates at these prices. A
plan must earn at least V. The loss of a pattern is what it earns less than the best one of its GPU type, and the losses
of a plan's patterns may sum to at most 1 - V. So a pattern with a larger loss is in no plan, and is removed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from cotenant.policy.serving.packing.kernel import Tables
from cotenant.policy.solver import compressed, solve_milp

VECTORS = 4000  # if a partition has more batch vectors than this, no patterns are listed
PAIRS = 4_000_000  # pairs of batch vectors, for two partitions of a GPU, are listed only up to this number
PRICES = 16  # number of recent price vectors that a node of the search tries before it computes a new one
TINY = 1e-9


@dataclass(frozen=True)
class SharedTable:
    """The patterns, ways to divide a GPU into at most two gpulets. rates (C, 2, S): requests/s that each of two gpulets
    gives each service; caps (C, S): of both gpulets together; kind (C): GPU type; parts (C, 2): their partitions, -1:
    none.
    """

    rates: np.ndarray
    kind: np.ndarray
    parts: np.ndarray
    caps: np.ndarray


def shared_table(T: Tables, types: Sequence[int]) -> SharedTable | None:
    """Return all undominated patterns (ways to divide a GPU) of these GPU types with at most two gpulets; None if there
    would be too many.
    """
    found: list[_Rows] = []
    for t in types:
        parts = np.nonzero(T.size["allowed"][t])[0].tolist()
        listed = {p: _Vectors(T, t, p, _vectors(T, t, p)) for p in parts}
        sizes = [len(v.batches) for v in listed.values()]
        pairs = [
            (p, q) for p in parts for q in parts
            if p <= q and T.gpu["lets"][t] > 1 and T.size["share"][t, p] + T.size["share"][t, q] <= 1 + TINY
        ]  # fmt: skip
        joint = sum(len(listed[p].batches) * len(listed[q].batches) for p, q in pairs)
        if max(sizes) > VECTORS or joint > PAIRS:
            return None
        for p, v in listed.items():
            work = v.work(np.array([-1.0]))[:, 0]
            keep = np.nonzero(work <= v.limit)[0]
            rates = v.rates(keep, work[keep]) * float(T.size["procs"][t, p])
            rates = rates[undominated(rates)]
            found.append(_Rows(t, (p, -1), np.stack([rates, np.zeros_like(rates)], axis=1)))
        for p, q in pairs:
            found += _beside(t, listed[p], listed[q])
    all_rates = np.concatenate([x.rates for x in found])
    kind = np.concatenate([np.full(len(x.rates), x.kind) for x in found])
    at = np.concatenate([np.tile(np.array(x.parts), (len(x.rates), 1)) for x in found])
    return SharedTable(all_rates, kind, at, all_rates.sum(axis=1))


def _vectors(T: Tables, t: int, p: int) -> np.ndarray:
    """Return (n, S): the batches of every set of services that keep their SLOs if they take turns on partition p,
    without neighbours.
    """
    services, slo = len(T.svc), T.svc["slo"]
    ms = _ms(T, t, p)
    several = T.size["procs"][t, p] == 1
    out = [np.zeros((0, services), np.int16)]
    count = 0
    for n in range(1, services + 1 if several else 2):
        before = count
        for chosen in combinations(range(services), n):
            limit = slo[list(chosen)].min() / 2
            grids = [np.nonzero(ms[s] <= limit)[0] for s in chosen]
            apart = len(set(T.svc["group"][list(chosen)].tolist())) > 1
            if apart or sum(ms[s][g[0]] if g.size else np.inf for s, g in zip(chosen, grids, strict=True)) > limit:
                continue
            if np.prod([float(g.size) for g in grids]) > 100 * VECTORS or count > VECTORS:
                return np.zeros((VECTORS + 1, services), np.int16)
            mesh = np.meshgrid(*grids, indexing="ij")
            work = sum(ms[s][g] for s, g in zip(chosen, mesh, strict=True))
            fits = np.asarray(work) <= limit
            rows = np.zeros((int(fits.sum()), services), np.int16)
            for s, g in zip(chosen, mesh, strict=True):
                rows[:, s] = g[fits]
            out.append(rows)
            count += len(rows)
        if count == before:
            break  # no set of this many services keeps its SLOs, so no larger set does
    return np.concatenate(out)


def _ms(T: Tables, t: int, p: int) -> np.ndarray:
    """Return (S, B+1): milliseconds of each service's batch alone on partition p; inf for a batch of 0."""
    model = T.svc["model"]
    ms: np.ndarray = (T.lat[t, model, p] + T.cell["over"][t, model]) * T.gpu["margin"][t]
    ms[:, 0] = np.inf
    return ms


class _Vectors:
    """The batch vectors (one batch size for each service) of a partition, with the work of their cycles and their
    rates.
    """

    def __init__(self, T: Tables, t: int, p: int, batches: np.ndarray) -> None:
        self.T, self.t, self.p, self.batches = T, t, p, batches
        self.limit = np.where(batches > 0, T.svc["slo"][None, :], np.inf).min(axis=1, initial=np.inf) / 2
        other = T.cell["other"][t, T.svc["model"]]
        self.press = np.where(batches > 0, other[np.arange(len(T.svc))[None, :], batches], 0.0).max(axis=1, initial=0.0)
        self.press *= T.size["share"][t, p]

    def work(self, pressure: np.ndarray) -> np.ndarray:
        """Return the length of a gpulet's cycle in ms, for each of its n batch vectors and each of m pressures, as an
        array (n, m). A pressure says how much the neighbours slow the gpulet down; one below 0 means no neighbours.
        """
        T, t, p = self.T, self.t, self.p
        out = np.zeros((len(self.batches), len(pressure)))
        for s, m in enumerate(T.svc["model"].tolist()):
            cell, lat = T.cell[t, m], np.where(np.isfinite(T.lat[t, m, p]), T.lat[t, m, p], 0.0)
            beside = T.gpu["alpha0"][t] + cell["own"][:, None] * T.size["share"][t, p] + pressure[None, :]
            alpha = np.where(pressure[None, :] < 0, 1.0, np.maximum(1.0, beside))
            ms = (lat[:, None] * alpha + cell["over"][:, None]) * T.gpu["margin"][t]
            ms[0] = 0.0
            out += ms[self.batches[:, s]]
        return out

    def rates(self, rows: np.ndarray, work: np.ndarray) -> np.ndarray:
        """Return (len(rows), S): requests/s of each service under these batch vectors, if their cycles take `work` ms.
        """
        return self.batches[rows] * 1000.0 / work[:, None]


class _Rows(NamedTuple):
    """The patterns (ways to divide a GPU) of one pair of partitions: rates (n, 2, S)."""

    kind: int
    parts: tuple[int, int]
    rates: np.ndarray


def _beside(t: int, a: _Vectors, b: _Vectors) -> list[_Rows]:
    """Return the undominated patterns of two gpulets (parts of a GPU), for each combination of services on them."""
    work_a, work_b = a.work(b.press), b.work(a.press).T
    i, j = np.nonzero((work_a <= a.limit[:, None]) & (work_b <= b.limit[None, :]))
    weight = 1 << np.arange(a.batches.shape[1], dtype=np.int64)
    held = ((a.batches[i] > 0) @ weight << len(weight)) + (b.batches[j] > 0) @ weight
    out = []
    for group in np.unique(held):
        x, y = i[held == group], j[held == group]
        rates = np.stack([a.rates(x, work_a[x, y]), b.rates(y, work_b[x, y])], axis=1)
        out.append(_Rows(t, (a.p, b.p), rates[undominated(rates.sum(axis=1))]))
    return out


def undominated(caps: np.ndarray) -> np.ndarray:
    """Return the indices of the rows that no other row exceeds or equals in all columns."""
    order = np.argsort(-caps.sum(axis=1), kind="stable")
    kept = np.zeros_like(caps)
    chosen: list[int] = []
    for i in order:
        if not (kept[: len(chosen)] >= caps[i] - 1e-12).all(axis=1).any():
            kept[len(chosen)] = caps[i]
            chosen.append(int(i))
    return np.array(chosen, np.int64)


@dataclass
class _Search:
    """The state of one search for patterns that serve all rates. `late`: the search has run out of time."""

    table: SharedTable
    ends: float
    late: bool = False

    def within(self) -> bool:
        self.late = self.late or time.monotonic() > self.ends
        return not self.late

    def prices(self, caps: np.ndarray, kind: np.ndarray, rates: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return (S + T,): first a price for each service, such that all GPUs together earn at most 1 and the rates are
        worth most; then what the best pattern of each GPU type earns."""
        services, types = len(rates), len(counts)
        rows = np.zeros((len(caps) + 1, services + types))
        rows[:-1, :services] = caps
        rows[np.arange(len(caps)), services + kind] = -1.0
        rows[-1, services:] = counts
        found = solve_milp(
            np.concatenate([rates, np.zeros(types)]), compressed(rows), np.full(len(rows), -np.inf),
            np.concatenate([np.zeros(len(caps)), [1.0]]), np.zeros(services + types), np.full(services + types, 1e9),
            np.zeros(services + types, bool), maximise=True, time_limit_s=60.0,
        )  # fmt: skip
        price = np.zeros(services) if found.x is None else np.maximum(found.x[:services], 0.0)
        # The value of a pattern is the sum of its capacities, each times the price of its service. If the price of a
        # GPU type is the value of its best pattern, these prices are feasible for the dual problem, so by weak duality
        # they bound what any plan can serve.
        earned = caps @ price
        worth = np.array([earned[kind == t].max(initial=0.0) for t in range(types)])
        # the last operand avoids a division by 0 if all patterns have the value 0
        total = float(counts @ worth) or float(price @ rates) / 2 or 1.0
        return np.concatenate([price, worth]) / total

    def cover(self, rows: np.ndarray, caps: np.ndarray, rates: np.ndarray, counts: np.ndarray) -> list[int] | None:
        """Return patterns (ways to divide a GPU) that together serve the rates, among these rows of the table with
        these capacities; None if there are none.
        """
        if not (rates > 0).any():
            return []
        kind = self.table.kind[rows]
        usable = counts[kind] > 0
        rows, kind, caps = rows[usable], kind[usable], np.minimum(caps[usable], rates)
        if counts.sum() <= 1 or not len(rows):
            serves = (caps >= rates - 1e-9 * np.maximum(1.0, rates)).all(axis=1)
            return [int(rows[np.argmax(serves)])] if counts.sum() and serves.any() else None
        price = self.prices(caps, kind, rates, counts)
        worth = float(price[: len(rates)] @ rates)
        if worth > 1 + TINY:
            return None
        lost = price[len(rates) :][kind] - caps @ price[: len(rates)]
        near = np.nonzero(lost <= 1 - worth + TINY)[0]
        for t in np.unique(kind):
            mine = near[kind[near] == t]
            near = np.concatenate([near[kind[near] != t], mine[undominated(caps[mine])]])
        rows, caps, kind, lost = rows[near], caps[near], kind[near], lost[near]
        if not len(rows):
            return None
        urgent = int(np.argmax(rates / np.maximum(caps.max(axis=0), TINY)))
        alive = np.ones(len(rows), bool)
        known = [price]
        for i in np.argsort(lost, kind="stable"):
            if caps[i, urgent] <= 0:
                continue
            if not self.within():
                return None
            rest = rates - caps[i]
            rest[rest <= TINY * np.maximum(1.0, rates)] = 0.0
            left = counts.copy()
            left[kind[i]] -= 1
            if not self._priced_out(caps[alive], kind[alive], rest, left, known):
                found = self.cover(rows[alive], caps[alive], rest, left)
                if found is not None:
                    return [int(rows[i]), *found]
            alive[i] = False
        return None

    def _priced_out(
        self, caps: np.ndarray, kind: np.ndarray, rates: np.ndarray, counts: np.ndarray, known: list[np.ndarray]
    ) -> bool:
        """Whether prices prove that the rates cannot be served. New prices are added to `known`."""
        if not (rates > 0).any() or counts.sum() <= 1:
            return False
        cut = np.minimum(caps, rates)
        for price in known[-PRICES:]:
            earned = cut @ price[: len(rates)]
            most = sum(float(earned[kind == t].max(initial=0.0)) * n for t, n in enumerate(counts.tolist()) if n)
            if float(price[: len(rates)] @ rates) > most * (1 + TINY):
                return True
        usable = counts[kind] > 0
        if not usable.any():
            return True
        price = self.prices(cut[usable], kind[usable], rates, counts)
        known.append(price)
        return float(price[: len(rates)] @ rates) > 1 + TINY


def serve_all(table: SharedTable, rates: np.ndarray, counts: np.ndarray, time_limit_s: float) -> tuple[str, list[int]]:
    """Search for patterns (ways to divide a GPU) that serve the rates. Returns (found, patterns), (infeasible, none) if
    no plan at all serves the rates, or (undecided, none) if the time ran out.
    """
    search = _Search(table, time.monotonic() + time_limit_s)
    found = search.cover(np.arange(len(table.caps)), table.caps, rates, counts)
    if found is not None:
        return "found", found
    return ("undecided" if search.late else "infeasible"), []
