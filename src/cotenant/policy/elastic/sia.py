"""Sia (SOSP 2023): chooses one configuration (GPU model and number of GPUs) for each job, optimising the sum of powers
of normalised goodputs.

There are three solvers for this objective: dynamic programming on clusters of few GPUs, a mixed-integer program, and
prices on the GPU models (Lagrangian relaxation), which also give a bound on the distance from the optimum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cotenant.policy.elastic.view import NONE, Decision, ElasticPolicy, Floats, Ints, View
from cotenant.policy.solver import solve_milp

POWER = -0.5  # exponent p of the paper; it is below 0, so the slowest jobs count most
WAITING = 1.1  #: lambda: cost of a waiting job; a job in its slowest configuration costs 1
GROWTH = 2  #: factor by which a job's largest number of GPUs may grow in one decision
STEPS = 48  # number of steps in which the prices of the GPU models are adjusted
LOOKS = 8  # the solver tries to build a feasible choice once in this many steps
#: the dynamic program is used up to this number of configurations of all jobs x ways to leave GPUs free; above it the
#: mixed-integer program is faster
CELLS = 4_000_000


def values(view: View) -> Floats:
    """Return the value of each configuration [J, C]: lambda - (r x G)^p; 0 or less if waiting is as good.

    G is the goodput relative to the job's least over its allowed configurations; r is `restart_factor`.
    """
    may = allowed(view)
    slowest = np.where(may, view.rate, np.inf).min(axis=1, initial=np.inf)
    gain = np.where(may, view.rate / np.where(np.isfinite(slowest), slowest, 1.0)[:, None], 0.0)
    weighted = gain * restart_factor(view)
    return np.asarray(np.where(weighted > 0, WAITING - np.maximum(weighted, 1e-12) ** POWER, 0.0))


def allowed(view: View) -> NDArray[np.bool_]:
    """Return [J, C], the allowed configurations: up to twice as many GPUs as the job ever had; for a new job the least
    measured number.
    """
    count = view.options.count
    least = np.where(view.rate > 0, count, np.iinfo(np.int64).max).min(axis=1)
    return np.asarray((view.rate > 0) & (count <= np.maximum(GROWTH * view.most, least)[:, None]))


def restart_factor(view: View) -> Floats:
    """Return r [J, C], as in Pollux: (age - restarts x cost) / (age + cost), where cost is the duration of a restart.
    It is the fraction of a job's age that was left for work if the job restarts once more now. It is 1 for the present
    configuration, for a waiting job, and for a job younger than the cost."""
    kept = np.maximum(view.age_s - view.restarts * view.restart_s, 0.0) / np.maximum(view.age_s + view.restart_s, 1e-9)
    factor = np.where((view.age_s <= view.restart_s) | (view.held == NONE), 1.0, kept)
    here = np.arange(len(view.options.count)) == view.held[:, None]
    return np.asarray(np.where(here, 1.0, factor[:, None]))


@dataclass
class Sia(ElasticPolicy):
    """The Sia policy. `exact`: find the optimum, by dynamic programming or by the mixed-integer program, which has the
    time limit `limit_s` for each decision; otherwise use prices only.
    """

    exact: bool = True
    limit_s: float = 1.0
    timed_out: int = 0
    worst_gap: float = 0.0

    def decide(self, view: View) -> Decision:
        """Choose the configuration (GPU model and number of GPUs) of every job."""
        value, options = values(view), view.options
        if self.exact and count_cells(value, options.capacity) <= CELLS:
            self.solves += 1
            return Decision(choose_by_tables(value, options.gpu, options.count, options.capacity))
        by_prices, bound = choose_by_prices(value, view.options.gpu, view.options.count, view.options.capacity)
        config, reached = by_prices, worth(value, by_prices)
        if self.exact and bound > reached * (1 + 1e-9):
            solved = choose_exactly(value, view, by_prices, self.limit_s)
            self.timed_out += not solved.proven
            if worth(value, solved.config) >= reached:
                config, reached = solved.config, worth(value, solved.config)
            bound = min(bound, solved.bound)
        self.solves += 1
        if bound > 0:
            self.worst_gap = max(self.worst_gap, (bound - reached) / bound)
        return Decision(config)

    def summary(self) -> dict[str, Any]:
        """Return also the number of timeouts and the largest relative distance from the optimum."""
        return super().summary() | {"timed_out": self.timed_out, "worst_gap": self.worst_gap}


def worth(value: Floats, config: Ints) -> float:
    """Return the objective value of a choice: the sum of the values of the configurations `config` of all jobs."""
    rows = np.flatnonzero(config != NONE)
    return float(value[rows, config[rows]].sum())


@dataclass(frozen=True)
class Solved:
    """A solution of the integer program, a bound on all its solutions, and whether the solution is proven optimal."""

    config: Ints
    bound: float
    proven: bool


def choose_exactly(value: Floats, view: View, start: Ints, limit_s: float) -> Solved:
    """Maximise the sum of values over at most one configuration for each job, within the capacity of each GPU model."""
    gpu, count, capacity = view.options.gpu, view.options.count, view.options.capacity
    rows, columns = np.nonzero(value > 0)
    jobs, g, n = len(view), len(capacity), len(rows)
    per_job = np.bincount(rows, minlength=jobs)
    starts = np.concatenate([[0], np.cumsum(per_job)])
    order = np.argsort(gpu[columns], kind="stable")
    per_gpu = np.bincount(gpu[columns], minlength=g)
    a = (
        np.concatenate([starts, starts[-1] + np.cumsum(per_gpu)]).astype(np.int32),
        np.concatenate([np.arange(n), order]).astype(np.int32),
        np.concatenate([np.ones(n), count[columns[order]]]).astype(np.float64),
    )
    first = np.where(start[rows] == columns, 1.0, 0.0)
    solution = solve_milp(
        value[rows, columns], a, np.full(jobs + g, -np.inf), np.concatenate([np.ones(jobs), capacity]),
        np.zeros(n), np.ones(n), np.ones(n, np.bool_), maximise=True, time_limit_s=limit_s, gap=1e-4, start=first,
    )  # fmt: skip
    if solution.x is None:
        return Solved(start, np.inf, False)
    config = np.full(jobs, NONE)
    taken = solution.x > 0.5
    config[rows[taken]] = columns[taken]
    return Solved(config, solution.bound, solution.status == "optimal")


def count_cells(value: Floats, capacity: Ints) -> int:
    """Return the number of steps that `choose_by_tables` takes."""
    return int(np.count_nonzero(value > 0)) * int(np.prod(capacity + 1))


def choose_by_tables(value: Floats, gpu: Ints, count: Ints, capacity: Ints) -> Ints:
    """Return the choice with the largest sum of values, by dynamic programming.

    After job j, best[f] is the largest sum over the jobs up to j with at most f[g] GPUs of each model g.
    """
    jobs, shape = len(value), tuple((capacity + 1).tolist())
    best = np.zeros(shape)
    picks = np.full((jobs, *shape), NONE, np.int16)
    for job in range(jobs):
        before, best = best, best.copy()
        for c in _useful(value[job], gpu, count):
            g, n = int(gpu[c]), int(count[c])
            if n > capacity[g]:
                continue
            to, from_ = (tuple(slice(a, b) if i == g else slice(None) for i in range(len(shape)))
                         for a, b in ((n, None), (0, -n)))  # fmt: skip
            sum_ = before[from_] + value[job, c]
            better = sum_ > best[to]
            np.copyto(best[to], sum_, where=better)
            picks[job][to][better] = c
    config, free = np.full(jobs, NONE), capacity.copy()
    for job in range(jobs - 1, -1, -1):
        c = int(picks[(job, *free.tolist())])
        if c != NONE:
            config[job] = c
            free[gpu[c]] -= count[c]
    return config


def _useful(value: Floats, gpu: Ints, count: Ints) -> list[int]:
    """Return the configurations that are worth more than waiting, and more than fewer GPUs of their model."""
    found: list[int] = []
    most: dict[int, float] = {}
    for c in sorted(np.flatnonzero(value > 0).tolist(), key=lambda c: (count[c], -value[c])):
        if value[c] > most.get(int(gpu[c]), 0.0):
            most[int(gpu[c])] = float(value[c])
            found.append(c)
    return found


def choose_by_prices(value: Floats, gpu: Ints, count: Ints, capacity: Ints) -> tuple[Ints, float]:
    """Return a choice and a bound on every choice, by Lagrangian relaxation of the capacities.

    Each GPU model has a price m per GPU. At these prices each job takes the configuration with the largest value - m x
    count. The sum of these maxima over all jobs, plus the sum over models of m x capacity, is an upper bound of the
    optimum. In each step, the price of a model follows its excess demand. In some steps (LOOKS) a feasible choice is
    built: configurations are dropped until the rest fits the capacity, then free GPUs are assigned. The best of these
    choices is returned.
    """
    jobs = len(value)
    config, bound = np.full(jobs, NONE), np.inf
    if jobs == 0 or value.size == 0:
        return config, 0.0
    models = len(capacity)
    prices = np.zeros(models)
    best = -1.0
    every = np.arange(jobs)
    scale = float(value.max()) / max(1.0, float(count.min()))
    for step in range(STEPS):
        net = value - (prices[gpu] * count)[None, :]
        net[value <= 0] = -np.inf
        pick = np.argmax(net, axis=1)
        gain = np.maximum(net[every, pick], 0.0)
        bound = min(bound, float(gain.sum() + (prices * capacity).sum()))
        wanted = np.where(gain > 0, pick, NONE)
        if step % LOOKS == 0 or step == STEPS - 1:
            fitted = _fill(value, gpu, count, _fit(value, gpu, count, capacity, wanted), capacity)
            if worth(value, fitted) > best:
                best, config = worth(value, fitted), fitted
        chosen = wanted[wanted != NONE]
        load = np.bincount(gpu[chosen], weights=count[chosen], minlength=models)
        excess = (load - capacity) / np.maximum(capacity, 1)
        if bound <= best * (1 + 1e-9) or not (excess[prices > 0].any() or (excess > 0).any()):
            break
        prices = np.maximum(prices + scale * 0.5 * 0.93**step * np.clip(excess, -1.0, 3.0), 0.0)
    return config, bound


def _fit(value: Floats, gpu: Ints, count: Ints, capacity: Ints, wanted: Ints) -> Ints:
    """Drop jobs' configurations until the rest fits the capacity: those with the least value per GPU first."""
    rows = np.flatnonzero(wanted != NONE)
    density = value[rows, wanted[rows]] / count[wanted[rows]]
    order = rows[np.argsort(-density, kind="stable")]
    config = np.full(len(wanted), NONE)
    for model in range(len(capacity)):
        mine = order[gpu[wanted[order]] == model]
        fits = np.cumsum(count[wanted[mine]]) <= capacity[model]
        config[mine[fits]] = wanted[mine[fits]]
    return config


def _fill(value: Floats, gpu: Ints, count: Ints, config: Ints, capacity: Ints) -> Ints:
    """Assign the remaining GPUs: give jobs configurations of higher value for which enough GPUs are free, those with
    the most additional value per additional GPU first."""
    config = config.copy()
    taken = config[config != NONE]
    free = capacity - np.bincount(gpu[taken], weights=count[taken], minlength=len(capacity)).astype(np.int64)
    has = np.where(config != NONE, value[np.arange(len(config)), config], 0.0)
    holds = np.where(config != NONE, count[config], 0)
    where = np.where(config != NONE, gpu[config], NONE)
    blocked: NDArray[np.bool_] = value <= 0
    while (free > 0).any():
        more = np.where(where[:, None] == gpu[None, :], count[None, :] - holds[:, None], count[None, :])
        gain = value - has[:, None]
        open_ = ~blocked & (more <= free[gpu][None, :]) & (gain > 1e-12)
        if not open_.any():
            break
        ratio = np.where(open_, gain / np.maximum(more, 0.5), -np.inf)
        # In each pass every job may change once, to its best configuration by this ratio. The largest ratios go first,
        # as long as GPUs are free. One pass for each change would take quadratic time.
        column = np.argmax(ratio, axis=1)
        rows = np.flatnonzero(open_[np.arange(len(config)), column])
        rows = rows[np.argsort(-ratio[rows, column[rows]], kind="stable")]
        for row in rows.tolist():
            c = int(column[row])
            needs = int(count[c] - holds[row]) if where[row] == gpu[c] else int(count[c])
            if needs > free[gpu[c]]:
                continue
            if where[row] != NONE and where[row] != gpu[c]:
                free[where[row]] += holds[row]
            free[gpu[c]] -= needs
            config[row], has[row], holds[row], where[row] = c, value[row, c], count[c], gpu[c]
    return config
