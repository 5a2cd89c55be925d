"""Spot and guaranteed jobs: spot jobs get what guaranteed jobs are predicted to leave (after GFS, ASPLOS 2026).

Jobs with priority above 0 are guaranteed, the others spot. Guaranteed jobs go first and preempt spot jobs; a reserve
for predicted guaranteed jobs prevents spot jobs from starting where they would soon be preempted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cotenant.policy.elastic.view import NONE, Decision, Floats, Ints, View, rigid

HORIZON = 12  #: rounds of the prediction
MEMORY = 2016  #: rounds of demand that are stored: a week at 5 minutes
QUANTILE = 0.9


@dataclass
class Spot:
    """`predicts`: whether GPUs are reserved for predicted guaranteed jobs; otherwise spot jobs may take all.

    It stores the guaranteed demand of past rounds, [rounds, G], which together with the view determines the decision.
    """

    predicts: bool = True
    demand: deque[Floats] = field(default_factory=lambda: deque(maxlen=MEMORY), repr=False)

    def decide(self, view: View) -> Decision:
        """Guaranteed jobs by arrival, then spot jobs: those that run, oldest first, then those that wait."""
        choices = rigid(view)
        guaranteed = view.priority > 0
        capacity = view.options.capacity.astype(np.float64)
        free = capacity.copy()
        config = np.full(len(view), NONE)
        place(view, choices, np.flatnonzero(guaranteed), config, free, np.zeros(len(free)))
        self.demand.append(capacity - free)
        reserve = predicted_rise(np.array(self.demand)) if self.predicts else np.zeros(len(free))
        # a running spot job is preempted only by existing guaranteed jobs; the reserve applies to new ones
        spot = np.flatnonzero(~guaranteed)
        runs = spot[view.held[spot] != NONE]
        oldest = runs[np.argsort(-view.received_s[runs].sum(axis=1), kind="stable")]
        place(view, choices, oldest, config, free, np.zeros(len(free)))
        place(view, choices, spot[view.held[spot] == NONE], config, free, reserve)
        return Decision(config)

    def summary(self) -> dict[str, Any]:
        """Figures about solved programs: none, since this policy solves none."""
        return {}


def place(view: View, choices: Ints, rows: Ints, config: Ints, free: Floats, reserve: Floats) -> None:
    """Give each row in order its GPUs on its present model, else on the fastest, as long as `reserve` GPUs stay
    free.
    """
    for row in rows.tolist():
        gpus = view.options.gpu
        can = [c for c in choices[row].tolist() if c != NONE and free[gpus[c]] - view.wants[row] >= reserve[gpus[c]]]
        if can:
            held = int(view.held[row])
            config[row] = held if held in can else max(can, key=lambda c: float(view.rate[row, c]))
            free[gpus[config[row]]] -= view.wants[row]


def predicted_rise(demand: Floats) -> Floats:
    """GPUs by which the demand is predicted to rise within the horizon, by GPU model.

    The quantile, over past rounds t with a whole horizon behind them, of the largest demand of rounds t + 1 .. t +
    HORIZON less that of t; 0 until there are HORIZON such rounds.
    """
    rounds, models = demand.shape
    known = rounds - HORIZON
    if known < HORIZON:
        return np.zeros(models)
    windows = np.lib.stride_tricks.sliding_window_view(demand[1:], HORIZON, axis=0)  # [known, G, HORIZON]
    rise = np.maximum(windows.max(axis=2) - demand[:known], 0.0)
    return np.asarray(np.ceil(np.quantile(rise, QUANTILE, axis=0)))
