"""Tesserae (arXiv 2508.04953): orders jobs by a base policy, then pairs jobs on one GPU by a matching.

The base policy is least attained service in two queues, as in Tiresias. Jobs without a GPU are matched with single-GPU
jobs that have one, maximising the sum of normalised throughputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cotenant.policy.elastic.view import NONE, Decision, ElasticPolicy, Floats, Ints, View, rigid
from cotenant.policy.solver import compressed, solve_milp

QUEUE_GPU_S = 3600.0  # a job moves to the second queue when it has attained this many GPU-seconds (Tiresias, NSDI'19)


@dataclass(kw_only=True)
class PairingPolicy(ElasticPolicy):
    """An elastic policy under which two jobs may share a GPU. `pairs`: number of pairs in all decisions."""

    pairs: int = 0

    def paired(self, view: View, choices: Ints, config: Ints, host: Ints) -> Decision:
        """Return the decision that each job with a host joins it on its GPU."""
        guests = np.flatnonzero(host != NONE)
        config[guests] = choices[guests, view.options.gpu[config[host[guests]]]]
        self.solves += 1
        self.pairs += len(guests)
        return Decision(config, host)

    def summary(self) -> dict[str, Any]:
        """Return the number of decisions about pairs, all optimal, and the number of pairs in all of them."""
        return super().summary() | {"pairs": self.pairs}


@dataclass
class Tesserae(PairingPolicy):
    """The Tesserae policy. `packs`: two jobs may share a GPU."""

    packs: bool = True

    def decide(self, view: View) -> Decision:
        """Decide which jobs have GPUs of their own, and which pairs share one."""
        choices = rigid(view)
        order = by_attained_service(view)
        config = in_order(view, choices, order)
        if not self.packs:
            return Decision(config)
        return self.paired(view, choices, config, pack(view, choices, config, order))


def by_attained_service(view: View) -> Ints:
    """Return the rows of the view's jobs, ordered by priority, then queue (first or second), then arrival."""
    queue = view.received_s.sum(axis=1) * view.wants >= QUEUE_GPU_S
    return np.lexsort((np.arange(len(view)), queue, -view.priority))


def in_order(view: View, choices: Ints, order: Ints) -> Ints:
    """Place the jobs one after the other, in `order`: each on its present GPU model if that has enough free GPUs,
    otherwise on the fastest model with enough of them."""
    free = view.options.capacity.tolist()
    config = np.full(len(view), NONE)
    wants = view.wants.tolist()
    for row in order.tolist():
        can = [c for c in choices[row].tolist() if c != NONE and free[view.options.gpu[c]] >= wants[row]]
        if can:
            best = int(view.held[row]) if view.held[row] in can else max(can, key=lambda c: float(view.rate[row, c]))
            config[row] = best
            free[view.options.gpu[best]] -= wants[row]
        if not any(free):
            break
    return config


def pack(view: View, choices: Ints, config: Ints, order: Ints) -> Ints:
    """Return `host[J]`: the best matching of waiting single-GPU jobs (guests) with running ones (hosts); NONE for a job
    that is not a guest.

    The weight of a pair is given by `weights`. Jobs of one kind have equal weights, so the matching is between kinds,
    and says how many pairs of two kinds there are. Pairs that exist already are kept as far as the matching allows; for
    the other pairs the first guests in `order` are taken.
    """
    host = np.full(len(view), NONE)
    single = view.wants == 1
    hosts = np.flatnonzero(single & (config != NONE))
    guests = order[single[order] & (config[order] == NONE)]
    if not len(hosts) or not len(guests):
        return host
    gpu = view.options.gpu[config[hosts]]
    host_key, host_group = np.unique(np.column_stack([view.kind[hosts], gpu]), axis=0, return_inverse=True)
    guest_key, guest_group = np.unique(view.kind[guests], return_inverse=True)
    host_group, guest_group = host_group.reshape(-1), guest_group.reshape(-1)
    can = np.array([[choices[guests[guest_group == k][0], g] != NONE for k in range(len(guest_key))]
                    for _, g in host_key.tolist()])  # fmt: skip
    weight = np.where(can, weights(view.beside, host_key[:, 0], host_key[:, 1], guest_key), 0.0)
    pairs = match(weight, np.bincount(host_group), np.bincount(guest_group))
    guest_of = {int(view.host[g]): int(g) for g in guests.tolist() if view.host[g] != NONE}
    for i, k in zip(*np.nonzero(pairs), strict=True):
        mine = hosts[host_group == i].tolist()
        theirs = [g for g in guests[guest_group == k].tolist() if host[g] == NONE]
        taken = set(host[host != NONE].tolist())
        mine = sorted((h for h in mine if h not in taken), key=lambda h: guest_of.get(h, NONE) not in theirs)
        for h in mine[: pairs[i, k]]:
            guest = guest_of[h] if guest_of.get(h, NONE) in theirs else theirs[0]
            theirs.remove(guest)
            host[guest] = h
    return host


def weights(beside: Floats, kind: Ints, gpu: Ints, guest: Ints) -> Floats:
    """Return [hosts, guests], the weights of pairs. Each job keeps a fraction of its full speed beside the other; the
    weight is the sum of the two fractions. It is 0 for a pair that was not measured, and if the sum is not above 1,
    since the GPU then does no more work than with one job alone."""
    one = beside[kind[:, None], guest[None, :], gpu[:, None]]
    other = beside[guest[None, :], kind[:, None], gpu[:, None]]
    total = np.where((one > 0) & (other > 0), one + other, 0.0)
    return np.asarray(np.where(total > 1.0, total, 0.0))


def match(weight: Floats, hosts: Ints, guests: Ints) -> Ints:
    """Return the maximum-weight matching between hosts and guests as a table: in row r and column s, how many jobs of
    host group r are paired with jobs of guest group s. `hosts[r]`, `guests[s]`: number of jobs in each group.

    The vertices of the matching's linear program are integral, since its rows and columns are those of a bipartite
    graph, and the simplex method ends in a vertex.
    """
    r, s = weight.shape
    matrix = np.zeros((r + s, r * s))
    for i in range(r):
        matrix[i, i * s : (i + 1) * s] = 1.0
    for k in range(s):
        matrix[r + k, k : r * s : s] = 1.0
    upper = np.where(weight > 0, np.minimum(hosts[:, None], guests[None, :]), 0).reshape(-1).astype(np.float64)
    solution = solve_milp(
        weight.reshape(-1), compressed(matrix), np.full(r + s, -np.inf), np.concatenate([hosts, guests]).astype(float),
        np.zeros(r * s), upper, np.zeros(r * s, np.bool_), maximise=True, time_limit_s=60,
    )  # fmt: skip
    if solution.x is None:
        return np.zeros((r, s), np.int64)
    return np.asarray(np.round(solution.x).astype(np.int64).reshape(r, s))
