"""Spot and guaranteed jobs (after GFS, ASPLOS 2026): spot jobs get the GPUs that guaranteed jobs are predicted not to
need.

Jobs with a priority above 0 are guaranteed, the others are spot jobs. Guaranteed jobs go first and preempt spot jobs.
GPUs are reserved for predicted guaranteed jobs, so that spot jobs do not start where they would soon be preempted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cotenant.policy.elastic.view import NONE, Decision, ElasticPolicy, Floats, Ints, View, rigid

HORIZON = 12  # number of future rounds for which the guaranteed jobs' demand is predicted
MEMORY = 2016  # number of past rounds whose demand is stored; with rounds of 5 minutes, this is a week
QUANTILE = 0.9


@dataclass
class Spot(ElasticPolicy):
    """The policy for spot and guaranteed jobs. `predicts`: GPUs are reserved for predicted guaranteed jobs; otherwise
    spot jobs may take all.

    It stores the guaranteed jobs' demand in past rounds, [rounds, G], which together with the view determines the
    decision.
    """

    predicts: bool = True
    demand: deque[Floats] = field(default_factory=lambda: deque(maxlen=MEMORY), repr=False)

    def decide(self, view: View) -> Decision:
        """Place guaranteed jobs by arrival, then running spot jobs, oldest first, then waiting spot jobs."""
        choices = rigid(view)
        guaranteed = view.priority > 0
        capacity = view.options.capacity.astype(np.float64)
        free = capacity.copy()
        config = np.full(len(view), NONE)
        place(view, choices, np.flatnonzero(guaranteed), config, free, np.zeros(len(free)))
        self.demand.append(capacity - free)
        reserve = predicted_rise(np.array(self.demand)) if self.predicts else np.zeros(len(free))
        # a running spot job is preempted only for guaranteed jobs that have arrived; the reserve for predicted ones
        # only keeps new spot jobs from starting
        spot = np.flatnonzero(~guaranteed)
        runs = spot[view.held[spot] != NONE]
        oldest = runs[np.argsort(-view.received_s[runs].sum(axis=1), kind="stable")]
        place(view, choices, oldest, config, free, np.zeros(len(free)))
        place(view, choices, spot[view.held[spot] == NONE], config, free, reserve)
        return Decision(config)

    def summary(self) -> dict[str, Any]:
        """Return figures about solved programs: none, since this policy solves no program."""
        return {}


def place(view: View, choices: Ints, rows: Ints, config: Ints, free: Floats, reserve: Floats) -> None:
    """Give each job in `rows`, in that order, the GPUs that it requests, on its present GPU model if possible,
    otherwise on the fastest, as long as `reserve` GPUs stay free.
    """
    for row in rows.tolist():
        gpus = view.options.gpu
        can = [c for c in choices[row].tolist() if c != NONE and free[gpus[c]] - view.wants[row] >= reserve[gpus[c]]]
        if can:
            held = int(view.held[row])
            config[row] = held if held in can else max(can, key=lambda c: float(view.rate[row, c]))
            free[gpus[config[row]]] -= view.wants[row]


def predicted_rise(demand: Floats) -> Floats:
    """Return by how many GPUs of each model the guaranteed demand is predicted to rise within the next HORIZON rounds.

    For every past round t that HORIZON rounds have followed, take the largest demand of the rounds t + 1 .. t + HORIZON
    less that of t. The result is the QUANTILE of these values; 0 until there are HORIZON of them.
    """
    rounds, models = demand.shape
    known = rounds - HORIZON
    if known < HORIZON:
        return np.zeros(models)
    # array of shape [known, G, HORIZON]: known rounds, GPU models, rounds after each
    windows = np.lib.stride_tricks.sliding_window_view(demand[1:], HORIZON, axis=0)
    rise = np.maximum(windows.max(axis=2) - demand[:known], 0.0)
    return np.asarray(np.ceil(np.quantile(rise, QUANTILE, axis=0)))
