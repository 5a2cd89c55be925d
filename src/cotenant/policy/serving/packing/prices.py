"""The table for exact covers: the patterns of a GPU (ways to divide it), and prices that prove that given request rates
cannot be served.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cotenant.core.errors import WorkError
from cotenant.policy.serving.packing.kernel import Tables
from cotenant.policy.serving.packing.patterns import Pattern, patterns
from cotenant.policy.solver import compressed, solve_milp

PRICES = 48


@dataclass(frozen=True)
class CoverTable:
    """Arrays of patterns and prices in the form that `cover.cover` takes, and the contents of each pattern (way to
    divide a GPU).
    """

    caps: np.ndarray
    kind: np.ndarray
    group: np.ndarray
    limits: np.ndarray
    prices: np.ndarray
    worth: np.ndarray
    solo: np.ndarray
    frac: np.ndarray
    cost: np.ndarray
    what: tuple[Pattern, ...]


def dual_prices(caps: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """Return (S,) prices at which no pattern (way to divide a GPU) earns more than 1 and `direction` is worth most: the
    dual of the pattern LP.
    """
    k, services = caps.shape
    solution = solve_milp(
        direction, compressed(caps), np.full(k, -np.inf), np.ones(k),
        np.zeros(services), np.full(services, np.inf), np.zeros(services, bool), maximise=True, time_limit_s=10.0,
    )  # fmt: skip
    if solution.x is None:
        raise WorkError(f"the planner cannot compute prices of the services: the solver returned {solution.status}")
    return solution.x


def cover_table(T: Tables) -> CoverTable:
    """Collect the patterns (ways to divide a GPU) of all GPU types in use, grouped by the pair of services that they
    serve, and a set of prices.
    """
    services = len(T.svc)
    found = []
    for t in sorted(set(T.gpu_type.tolist())):
        caps, what = patterns(T, t, np.nonzero(T.size["allowed"][t])[0].tolist())
        pairs = [(min(x[1] for x in w), max(x[1] for x in w)) for w in what]
        found += [(pair, t, i, row, w) for i, (pair, row, w) in enumerate(zip(pairs, caps, what, strict=True))]
    found.sort(key=lambda f: f[:3])
    caps = np.array([f[3] for f in found])
    kind = np.array([f[1] for f in found], np.int64)
    group = np.zeros((services, services, 2), np.int64)
    limits = np.zeros((3, services))
    for c, (pair, *_) in enumerate(found):
        if group[pair][1] == 0:
            group[pair][0] = c
        group[pair][1] = c + 1
        row = 0 if pair[0] == pair[1] else 1
        for s in pair:
            limits[row, s] = max(limits[row, s], caps[c, s])
    limits[2] = caps.max(axis=0)
    prices = _library(caps, kind, limits[2])
    worth = np.zeros((len(prices), T.gpu.shape[0]))
    for t in set(kind.tolist()):
        worth[:, t] = (caps[kind == t] @ prices.T).max(axis=0)
    types = sorted(set(kind.tolist()))
    sizes = np.nonzero(T.size["allowed"][types[0]])[0] if len(types) == 1 else np.zeros(0, np.int64)
    sizes = sizes[np.argsort(T.size["frac"][types[0], sizes], kind="stable")]
    return CoverTable(
        caps, kind, group, limits, prices, worth, np.ascontiguousarray(T.cap[types[0]][:, sizes]),
        np.ascontiguousarray(T.size["frac"][types[0], sizes]), np.ascontiguousarray(T.svc["cost"]),
        tuple(f[4] for f in found),
    )  # fmt: skip


def _library(caps: np.ndarray, kind: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """Return price vectors, one for each GPU type and each of these demands: the largest capacities of all services at
    once, that of each service alone, and random demands with a fixed seed, half of them without some services.
    `largest`: the most that one GPU gives each service.
    """
    services = len(largest)
    rng = np.random.default_rng(0)
    demands = [largest, *(np.eye(services) * largest)]
    for i in range(PRICES - len(demands)):
        demand = rng.gamma(0.7, size=services) * largest
        keep = rng.random(services) < 0.6 if i % 2 else np.ones(services, bool)
        demands.append(np.where(keep if keep.any() else True, demand, 0.0))
    prices = [dual_prices(caps[kind == t], d) for t in sorted(set(kind.tolist())) for d in demands]
    return np.unique(np.round(np.array(prices), 12), axis=0)
