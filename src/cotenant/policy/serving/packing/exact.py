"""Proofs of the exact planner: a bound on the rates that any plan can serve, and the fewest GPUs if each gpulet (part
of a GPU) has one model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from cotenant.core.serving import ServingPlan
from cotenant.policy.serving.packing.prices import CoverTable, dual_prices
from cotenant.policy.solver import compressed, solve_milp


@dataclass(frozen=True)
class Proof:
    """What was proven about serving the request rates with these GPUs.

    `factor`: no plan, with or without gpulets (parts of GPUs) that several models share, serves more than this factor
    of the rates. `chosen`: the patterns of a plan that was found, or None. `status`:

    - found: a plan was found
    - infeasible: no plan serves the rates, because `factor` is below 1, or because a search of all patterns found none
    - alone-infeasible: no plan with one model on each gpulet serves the rates; a plan with shared gpulets may
    - undecided: the time ran out
    """

    factor: float
    status: str
    chosen: np.ndarray | None = None


def rate_factor(table: CoverTable, rates: np.ndarray, counts: np.ndarray) -> float:
    """Return an upper bound on the factor by which all rates can be multiplied so that these GPUs still serve them. For
    each GPU type, the dual of the linear program over its patterns (ways to divide a GPU) gives a price per request/s
    of each service, such that these rates are worth most. Each such set of prices proves a bound (see patterns.py); the
    least one is returned.
    """
    best = math.inf
    for t in np.nonzero(counts)[0]:
        prices = dual_prices(table.caps[table.kind == t], rates)
        worth = np.array([(table.caps[table.kind == u] @ prices).max(initial=0.0) for u in range(len(counts))])
        value = float(prices @ rates)
        if value > 0:
            best = min(best, float(worth @ counts) / value)
    return best


def prove(table: CoverTable, rates: np.ndarray, counts: np.ndarray, time_limit_s: float, spare: float) -> Proof:
    """Bound the rates, then search for the fewest GPUs that serve `spare` times the rates with one model on each gpulet
    (part of a GPU), by a mixed-integer program over patterns, the ways to divide a GPU.
    """
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


def with_proof(plan: ServingPlan, proof: Proof) -> ServingPlan:
    """Return the plan with the outcome of the proof as a note."""
    said = {
        "infeasible": "proven infeasible",
        "alone-infeasible": "proven: no plan without shared gpulets; none with shared ones was found",
        "undecided": "undecided: the time limit was reached",
        "found": "undecided: the plan found does not fit the memory",
    }[proof.status]
    note = f"{said}; no plan serves more than {proof.factor:.4f} of the rates"
    return replace(plan, bound=proof.factor, proven_infeasible=proof.status == "infeasible", notes=(*plan.notes, note))
