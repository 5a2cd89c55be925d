"""Gavel (OSDI 2020): a linear program decides how jobs share the GPU models (for fairness, makespan or cost), and
rounds approximate its solution.

The program gives each job the fraction X of its time to spend on each GPU model. Each round then serves first the jobs
that have received least in relation to X. Jobs of one kind are equal, so the program has one variable for each kind and
model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cotenant.policy.elastic.view import NONE, Decision, ElasticPolicy, Floats, Ints, View, rigid
from cotenant.policy.solver import compressed, solve_milp

# weight, in the objective, of the mean throughput over all jobs; without this term, GPUs that do not help the worst job
# could stay idle
SECOND = 1e-3
# factor on a job's priority for GPU models on which the job has not run yet, so that it gets one of them soon
UNSERVED = 1e9
RESET_S = 1000.0  # the times that jobs have spent on models are reset at most this often, as in the public code


@dataclass
class Gavel(ElasticPolicy):
    """The Gavel policy with one of its objectives: `fairness` maximises the smallest normalised throughput, `makespan`
    minimises the time at which the last job ends, `cost` maximises work per price, and `agnostic` is fairness that
    treats all GPU models as equal, the paper's baseline.
    """

    goal: str = "fairness"
    known: dict[tuple[bytes, ...], Floats] = field(default_factory=dict, repr=False)
    # job -> (age of the job, time that it had run on each model) when these times were last reset
    since: dict[int, tuple[float, Floats]] = field(default_factory=dict, repr=False)

    def decide(self, view: View) -> Decision:
        """Decide which jobs run on which GPU model in the next round."""
        choices = rigid(view)
        shares = self._shares(view, choices)
        return Decision(serve_round(view, choices, shares, self._spent(view)))

    def _spent(self, view: View) -> Floats:
        """Return [J, G]: for each job, the fraction of the time since the last reset that it spent on each GPU model.
        """
        jobs = view.job.tolist()
        old = [self.since.get(job) for job in jobs]
        counted = np.array([age if then is None else age - then[0] for age, then in zip(view.age_s, old, strict=True)])
        elapsed = max((counted[i] for i, then in enumerate(old) if then is not None), default=RESET_S)
        if elapsed >= RESET_S and set(jobs) != self.since.keys():
            self.since = {job: (float(view.age_s[i]), view.received_s[i].copy()) for i, job in enumerate(jobs)}
            return np.zeros_like(view.received_s)
        before = np.array([np.zeros(view.received_s.shape[1]) if then is None else then[1] for then in old])
        return np.asarray((view.received_s - before) / np.maximum(counted, 1e-9)[:, None])

    def _shares(self, view: View, choices: Ints) -> Floats:
        """Return X[J, G], the fraction of its time that each job should spend on each GPU model."""
        key_of = np.column_stack([view.kind, view.priority])
        # the remaining work of all jobs changes all the time, so the solution is kept until a job arrives or leaves
        if self.goal == "makespan":
            key_of = np.column_stack([key_of, view.job])
        _, first, group, size = np.unique(key_of, axis=0, return_index=True, return_inverse=True, return_counts=True)
        group = group.reshape(-1)
        rates, wants, priority = rates_by_model(view, choices)[first], view.wants[first], view.priority[first]
        jobs = view.job if self.goal == "makespan" else size
        given = (rates, wants, priority, size, jobs, view.options.capacity, view.options.price)
        key = tuple(array.tobytes() for array in given)
        if key not in self.known:
            self.known = {key: allocate(self.goal, rates, wants, size, view, priority, view.left[first])}
            self.solves += 1
        return self.known[key][group]


def rates_by_model(view: View, choices: Ints) -> Floats:
    """Return [J, G]: work per second of each job on each GPU model, with as many GPUs as the job requests."""
    picked = np.take_along_axis(view.rate, np.maximum(choices, 0), axis=1)
    return np.asarray(np.where(choices == NONE, 0.0, picked))


def allocate(goal: str, rate: Floats, wants: Ints, size: Ints, view: View, priority: Ints, left: Floats) -> Floats:
    """Solve the linear program of the goal: X[R, G] for R groups of `size` equal jobs, the fraction of its time that
    each job of a group spends on each GPU model.

    Constraints: for each group, the sum of X over models is at most 1; for each model, the sum over groups of size x
    wants x X is at most the capacity; X = 0 where the rate is 0. Goals: Fairness maximises the least, over groups, of
    wants x throughput / (weight x throughput on an equal share of all models), with weight = 1 + priority. Makespan
    maximises the least of throughput / remaining work. Cost maximises the sum of throughput / price, where each job's
    throughput is relative to that on its fastest model. Agnostic is fairness with the same rate on all models.
    """
    capacity, price = view.options.capacity.astype(np.float64), view.options.price
    r = len(rate)
    if goal == "agnostic":
        rate = np.where(rate > 0, 1.0, 0.0)
    if goal == "cost":
        # GPU models that no job can use may have no price (NaN)
        value: Floats = np.where(rate > 0, rate / np.maximum(rate.max(axis=1, keepdims=True), 1e-300) / price, 0.0)
        return _solve(size[:, None] * value, np.zeros((r, 0)), rate, wants, size, capacity)
    if goal == "makespan":
        ratio = rate / np.maximum(left, 1e-300)[:, None]
        ratio = ratio / max(float(ratio.max()), 1e-300)
    else:
        equal = (rate * capacity).sum(axis=1, keepdims=True) / capacity.sum()
        ratio = wants[:, None] * rate / np.maximum(equal, 1e-300) / (1.0 + np.maximum(priority, 0))[:, None]
    mean = SECOND * size[:, None] * ratio / size.sum()
    return _solve(mean, ratio, rate, wants, size, capacity)


def _solve(value: Floats, least: Floats, rate: Floats, wants: Ints, size: Ints, capacity: Floats) -> Floats:
    """Solve a linear program: maximise value @ X + t subject to least @ X >= t for each group; without columns in
    `least` there is no t.
    """
    r, g = rate.shape
    floors = least.shape[1] > 0
    n = r * g + floors
    can = (rate > 0).any(axis=1)
    matrix = np.zeros((r + g + floors * int(can.sum()), n))
    for i in range(r):
        matrix[i, i * g : (i + 1) * g] = 1.0
    for j in range(g):
        matrix[r + j, j : r * g : g] = size * wants
    low = np.full(len(matrix), -np.inf)
    high = np.concatenate([np.ones(r), capacity, np.full(len(matrix) - r - g, np.inf)])
    for k, i in enumerate(np.flatnonzero(can).tolist() if floors else ()):
        matrix[r + g + k, i * g : (i + 1) * g] = least[i]
        matrix[r + g + k, -1] = -1.0
        low[r + g + k] = 0.0
    cost = np.concatenate([value.reshape(-1), np.ones(int(floors))])
    most = np.full(int(floors), np.inf if can.any() else 0.0)
    upper = np.concatenate([np.where(rate > 0, 1.0, 0.0).reshape(-1), most])
    solution = solve_milp(
        cost, compressed(matrix), low, high, np.zeros(n), upper, np.zeros(n, np.bool_), maximise=True, time_limit_s=60
    )
    if solution.x is None:
        return np.zeros((r, g))
    return np.asarray(np.clip(solution.x[: r * g], 0.0, 1.0).reshape(r, g))


def serve_round(view: View, choices: Ints, shares: Floats, spent: Floats) -> Ints:
    """Choose the jobs of one round by Gavel's mechanism. Pairs of job and model are ordered by X / (fraction of the
    time `spent` on the model), largest first; each job takes the first model of its pairs that has enough free GPUs.
    Pairs with X = 0 come last.
    """
    priority = np.where(spent > 0, shares / np.maximum(spent, 1e-300), shares * UNSERVED)
    jobs, models = np.nonzero(choices != NONE)
    keys = priority[jobs, models]
    order = np.lexsort((models, jobs, -shares[jobs, models], -keys))
    free = view.options.capacity.tolist()
    wants = view.wants.tolist()
    config = np.full(len(view), NONE)
    open_gpus = sum(free)
    for i in order.tolist():
        job, model = int(jobs[i]), int(models[i])
        if config[job] == NONE and wants[job] <= free[model]:
            config[job] = choices[job, model]
            free[model] -= wants[job]
            open_gpus -= wants[job]
            if open_gpus == 0:
                break
    return config
