"""Pollux (OSDI 2021) on one GPU model: chooses how many GPUs each job gets so that the power mean of all speedups is
best.

The paper searches placements with a genetic algorithm. Here every job gets its GPUs on as few nodes as possible, so its
speedup depends on their number alone, and a dynamic program finds the best numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cotenant.core.errors import InputError
from cotenant.policy.elastic.sia import allowed, restart_factor
from cotenant.policy.elastic.view import NONE, Decision, ElasticPolicy, Floats, Ints, View

POWER = -1.0  # exponent p of the paper's fitness function, the power mean of the speedups
WAITING = 1e4  # cost of a waiting job in the sum of speedup^p over jobs; it exceeds the sum over all running jobs


@dataclass
class Pollux(ElasticPolicy):
    """The Pollux policy: finds the numbers of GPUs with the least possible sum over jobs of 1 / speedup (see
    `costs`); WAITING stands for a job without GPUs."""

    def decide(self, view: View) -> Decision:
        """Decide the number of GPUs of each job. Raises InputError if the cluster has GPUs of several models."""
        if np.count_nonzero(view.options.capacity) > 1:
            what = "policy pollux is for clusters of one GPU model; sia chooses among several"
            raise InputError(what, field="cluster")
        self.solves += 1
        return Decision(best_counts(costs(view), view.options.count, int(view.options.capacity.sum())))


def costs(view: View) -> Floats:
    """Return [J, C]: 1 / speedup, infinite for configurations that the job may not have.

    The speedup is the goodput divided by the goodput on an equal share of the GPUs. The latter is interpolated between
    measured numbers of GPUs; if the share is smaller than all of them, it is proportional to the share. For a
    configuration other than the present one, the speedup is multiplied by the restart factor.
    """
    count, may = view.options.count, allowed(view)
    share = float(view.options.capacity.sum()) / max(1, len(view))
    fair = np.ones(len(view))
    for row in np.flatnonzero((view.rate > 0).any(axis=1)).tolist():
        known = view.rate[row] > 0
        counts, rates = count[known].astype(float), view.rate[row, known]
        fair[row] = np.interp(share, counts, rates) * min(1.0, share / counts[0])
    speedup = np.where(may, view.rate, 0.0) / fair[:, None] * restart_factor(view)
    with np.errstate(divide="ignore"):
        return np.asarray(np.where(speedup > 0, np.maximum(speedup, 1e-12) ** POWER, np.inf))


def best_counts(cost: Floats, count: Ints, capacity: int) -> Ints:
    """Choose at most one column per row so that the sum of costs is least and all fit into the capacity; a row without
    a column costs WAITING.

    least[g] after job j: the least sum over the jobs up to j with at most g GPUs.
    """
    jobs = len(cost)
    least = np.zeros(capacity + 1)
    picks = np.full((jobs, capacity + 1), NONE, np.int16)
    for job in range(jobs):
        best = least + WAITING
        for c in np.flatnonzero(np.isfinite(cost[job]) & (count <= capacity)).tolist():
            n = int(count[c])
            other = least[: capacity + 1 - n] + cost[job, c]
            better = other < best[n:]
            best[n:] = np.where(better, other, best[n:])
            picks[job, n:] = np.where(better, c, picks[job, n:])
        least = best
    config, left = np.full(jobs, NONE), capacity
    for job in range(jobs - 1, -1, -1):
        config[job] = picks[job, left]
        if config[job] != NONE:
            left -= int(count[config[job]])
    return config
