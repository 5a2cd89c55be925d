"""Gandiva (OSDI 2018): jobs take turns, and a second job shares a GPU if both together do more work that way.

Jobs run on the GPUs that they request. If there are more jobs than GPUs, they take turns, beginning with those that
have run for the shortest time. Then each waiting single-GPU job may share the GPU of a running one. The paper measures
a pair, and ends it if the two together do less work than one after the other. Here the speeds of pairs are known, so
only pairs that gain are made. Gandiva looks at one pair after the other, whereas Tesserae solves a matching over all of
them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cotenant.policy.elastic.tesserae import PairingPolicy, in_order
from cotenant.policy.elastic.view import NONE, Decision, Ints, View, rigid


@dataclass
class Gandiva(PairingPolicy):
    """The Gandiva policy: jobs take turns in the order of their run time, and pairs of jobs share a GPU."""

    def decide(self, view: View) -> Decision:
        """Decide which jobs have GPUs of their own, and which pairs share one."""
        choices = rigid(view)
        order = np.lexsort((np.arange(len(view)), view.received_s.sum(axis=1), -view.priority))
        config = in_order(view, choices, order)
        return self.paired(view, choices, config, first_gains(view, choices, config, order))


def first_gains(view: View, choices: Ints, config: Ints, order: Ints) -> Ints:
    """Choose a host for each waiting single-GPU job: first for the jobs that have a host now, then for the others, both
    in `order`. A possible host is a running single-GPU job that has no guest yet and with which the job gains: the sum
    of both speeds, as fractions of the speeds alone, is above 1. A job keeps its present host if that is possible;
    otherwise it gets the first possible one. Returns `host[J]`; NONE for a job without a host."""
    host, together = np.full(len(view), NONE), view.beside + view.beside.transpose(1, 0, 2)
    gains = (view.beside > 0) & (view.beside.transpose(1, 0, 2) > 0) & (together > 1.0)
    single = view.wants == 1
    hosts = order[single[order] & (config[order] != NONE)]
    free = np.zeros(len(view), np.bool_)
    free[hosts] = True
    waiting = [int(g) for g in order if single[g] and config[g] == NONE]
    gpu = view.options.gpu[config[hosts]]
    # jobs that already share a host's GPU come first (False sorts before True); within both groups the order stays,
    # since sorting is stable
    for guest in sorted(waiting, key=lambda g: view.host[g] == NONE):
        fits = free[hosts] & gains[view.kind[hosts], view.kind[guest], gpu] & (choices[guest, gpu] != NONE)
        found = hosts[fits]
        if len(found):
            host[guest] = view.host[guest] if view.host[guest] in found else found[0]
            free[host[guest]] = False
    return host
