"""Proofs of the exact planner: the best bound on the rates, and the fewest GPUs of single-model gpulets."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cotenant.policy.serving.packing.prices import CoverTable, dual_prices
from cotenant.policy.solver import compressed, solve_milp


@dataclass(frozen=True)
class Proof:
    """`factor`: no plan, with shared gpulets or without, serves more than this factor of the rates. `chosen`: patterns
    of a plan found, or None. `status`: found, infeasible (by the factor, or because a search of all patterns ended),
    alone-infeasible (no plan of single-model gpulets exists; shared ones remain possible up to the factor) or undecided
    (the time ran out)."""

    factor: float
    status: str
    chosen: np.ndarray | None = None


def rate_factor(table: CoverTable, rates: np.ndarray, counts: np.ndarray) -> float:
    """The pattern LP's bound on a common factor on the rates, from the best prices for these very rates."""
    best = math.inf
    for t in np.nonzero(counts)[0]:
        prices = dual_prices(table.caps[table.kind == t], rates)
        worth = np.array([(table.caps[table.kind == u] @ prices).max(initial=0.0) for u in range(len(counts))])
        value = float(prices @ rates)
        if value > 0:
            best = min(best, float(worth @ counts) / value)
    return best


def prove(table: CoverTable, rates: np.ndarray, counts: np.ndarray, time_limit_s: float, spare: float) -> Proof:
    """Bound the rates, then look for the fewest GPUs of single-model gpulets that serve `spare` times them (MILP over
    patterns)."""
    factor = rate_factor(table, rates, counts)
    if factor < 1 - 1e-9:
        return Proof(factor, "infeasible")
    kinds = np.zeros((len(counts), len(table.caps)))
    kinds[table.kind, np.arange(len(table.caps))] = 1.0
    n = len(table.caps)
    found = solve_milp(
        np.ones(n), compressed(np.vstack([table.caps.T, kinds])),
        np.concatenate([rates * spare, np.zeros(len(counts))]),
        np.concatenate([np.full(len(rates), np.inf), counts.astype(float)]),
        np.zeros(n), np.full(n, float(counts.sum())), np.ones(n, bool), time_limit_s=time_limit_s,
    )  # fmt: skip
    if found.x is not None:
        times = np.round(found.x).astype(np.int64)
        return Proof(factor, "found", np.repeat(np.arange(n), times))
    return Proof(factor, "alone-infeasible" if found.status == "infeasible" else "undecided")
