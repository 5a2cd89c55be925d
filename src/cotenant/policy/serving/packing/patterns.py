"""GPU patterns: ways to divide one GPU among gpulets (parts of the GPU) with one model each, and the bounds that they
prove.

A pattern gives each service a capacity. A gpulet that several models share runs a batch of b_i requests of model i in
time e_i, and so gives the capacities `b_i / sum(e)`. For any prices pi, `sum(pi_i b_i) / sum(e_i)` is a mediant, so it
is never above the best `pi_i b_i / e_i` of one of its models alone. That model alone keeps its SLO, and causes no more
pressure on its neighbours. So patterns of gpulets with one model attain the best value at all prices, and for every
`pi >= 0` and n GPUs

sum(pi_s rate_s) <= n * max over patterns of sum(pi_s capacity_s)

holds for every plan, also those with shared gpulets. With the best prices this is the dual of the pattern LP.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from cotenant.policy.serving.packing.kernel import Tables

# the contents of a divided GPU, for each of its gpulets (parts): (partition, service, batch)
Pattern = tuple[tuple[int, int, int], ...]


class Options:
    """All pairs (service, batch) that keep the service's SLO on one partition of one GPU type, with no other model
    there.
    """

    def __init__(self, T: Tables, t: int, p: int) -> None:
        m = T.svc["model"]
        batches = np.arange(T.cell.shape[2])
        lat = T.lat[t, m, p]  # latencies, of shape (S, B+1)
        alone = (lat + T.cell["over"][t, m]) * T.gpu["margin"][t]
        ok = (2.0 * alone <= T.svc["slo"][:, None]) & (batches > 0) & np.isfinite(alone)
        if T.gpu["alpha0"][t] <= 1 and not T.cell["own"][t, m].any() and not T.cell["other"][t, m].any():
            # without interference from neighbours, a service needs no other batch size than its fastest
            rps = np.where(ok, batches * 1000.0 / np.where(ok, alone, 1.0), 0.0)
            ok &= batches == np.argmax(rps, axis=1)[:, None]
        self.service, self.batch = np.nonzero(ok)
        at = (self.service, self.batch)
        self.lat, self.over = lat[at], T.cell["over"][t, m][at]
        self.own = T.cell["own"][t, m][at] * T.size["share"][t, p]
        self.press = T.cell["other"][t, m][at] * T.size["share"][t, p]
        self.margin, self.slo = T.gpu["margin"][t], T.svc["slo"][self.service]
        self.alpha0 = T.gpu["alpha0"][t]
        self.alone_rps = self.batch * 1000.0 / alone[at] * T.size["procs"][t, p]

    def beside(self, press: np.ndarray) -> np.ndarray:
        """Return (options, len(press)): the requests/s of each option beside neighbours that slow it down by these
        pressures; 0 if the SLO is exceeded.
        """
        alpha = np.maximum(1.0, self.alpha0 + self.own[:, None] + press[None, :])
        ms = (self.lat[:, None] * alpha + self.over[:, None]) * self.margin
        rps = self.batch[:, None] * 1000.0 / ms
        return np.where(2.0 * ms <= self.slo[:, None], rps, 0.0)


def pareto(points: np.ndarray) -> np.ndarray:
    """Return the indices of the points of an (n, 2) array that no other point exceeds or equals in both coordinates."""
    order = np.lexsort((-points[:, 1], -points[:, 0]))
    best = np.maximum.accumulate(np.concatenate(([-np.inf], points[order, 1]))[:-1])
    return order[points[order, 1] > best]


def patterns(T: Tables, t: int, parts: Sequence[int]) -> tuple[np.ndarray, list[Pattern]]:
    """Return the patterns of a GPU of type t that is divided into at most two gpulets, whose partitions are among
    `parts`. If these are the parts of a MIG instance, the result is the patterns of that instance.

    The first result, of shape (patterns, S), is the requests/s of each service under each pattern. The second is, for
    each pattern, (partition, service, batch) of each gpulet. A pattern is left out if another one with the same
    partitions and services serves at least as much of each service.
    """
    S = len(T.svc["slo"])
    rows: list[np.ndarray] = []
    what: list[Pattern] = []
    options = {p: Options(T, t, p) for p in parts}
    for p in parts:
        o = options[p]
        for s in range(S):
            mine = np.nonzero(o.service == s)[0]
            if mine.size:
                i = mine[np.argmax(o.alone_rps[mine])]
                rows.append(np.eye(S)[s] * o.alone_rps[i])
                what.append(((p, s, int(o.batch[i])),))
    if T.gpu["lets"][t] < 2:
        return np.array(rows).reshape(-1, S), what
    for p, q in product(parts, parts):
        if p > q or T.size["share"][t, p] + T.size["share"][t, q] > 1 + 1e-9:
            continue
        a, b = options[p], options[q]
        # both arrays have one row for each option (service and batch) of partition p and one column for each option of
        # q
        rate_a, rate_b = a.beside(b.press), b.beside(a.press).T
        for sa, sb in product(range(S), range(S)):
            ia, ib = np.nonzero(a.service == sa)[0], np.nonzero(b.service == sb)[0]
            if not ia.size or not ib.size:
                continue
            grid = np.ix_(ia, ib)
            points = np.stack([rate_a[grid].ravel(), rate_b[grid].ravel()], axis=1)
            points[(points <= 0).any(axis=1)] = 0.0
            if sa == sb:
                points = np.stack([points.sum(axis=1), np.zeros(len(points))], axis=1)
            for i in pareto(points):
                if points[i, 0] <= 0:
                    continue
                row = np.zeros(S)
                row[sa] += points[i, 0]
                row[sb] += points[i, 1]
                rows.append(row)
                x, y = divmod(int(i), len(ib))
                what.append(((p, sa, int(a.batch[ia[x]])), (q, sb, int(b.batch[ib[y]]))))
    return np.array(rows).reshape(-1, S), what
