"""Searches for GPU patterns (ways to divide a GPU among models) that together serve all request rates. The depth-first
search is exact: it leaves out a branch only if a bound proves that the branch has no solution.

The bound is mostly a vector of prices, one for a request to each service, with its *worth*: the most that one GPU of
each type can earn at these prices. If the value of the remaining demand exceeds the worth of the remaining GPUs, these
GPUs cannot serve it, not even with parts of GPUs that several models share (see patterns.py).
"""

from __future__ import annotations

import numpy as np

from cotenant.policy.compiled import inner, jit

FOUND, NONE, LIMIT = 1, 0, -1
TOL = 1.0 + 1e-9


@inner
def may_fit(prices: np.ndarray, worth: np.ndarray, demand: np.ndarray, counts: np.ndarray) -> bool:
    """Whether this number of GPUs of each type may serve the demand; False if one of the price vectors proves that it
    does not.
    """
    for i in range(prices.shape[0]):
        value, most = 0.0, 0.0
        for s in range(demand.shape[0]):
            value += prices[i, s] * demand[s]
        for t in range(counts.shape[0]):
            most += counts[t] * worth[i, t]
        if value > most * TOL:
            return False
    return True


@jit
def bound_of(prices: np.ndarray, worth: np.ndarray, demand: np.ndarray, counts: np.ndarray) -> tuple[float, int]:
    """Return the lowest upper bound on the factor by which all demands can be multiplied so that these GPUs may still
    serve them, and the index of the price vector that proves it.
    """
    best, at = np.inf, 0
    for i in range(prices.shape[0]):
        value, most = 0.0, 0.0
        for s in range(demand.shape[0]):
            value += prices[i, s] * demand[s]
        for t in range(counts.shape[0]):
            most += counts[t] * worth[i, t]
        if value > 0.0 and most / value < best:
            best, at = most / value, i
    return best, at


@inner
def open_node(
    caps: np.ndarray, kind: np.ndarray, group: np.ndarray, largest: np.ndarray, price: np.ndarray, rest: np.ndarray,
    counts: np.ndarray, score: np.ndarray,
) -> None:  # fmt: skip
    """Compute the score of every pattern (way to divide a GPU) that serves the service with the greatest need: the
    value of the demand that it would serve. The other patterns get -1.
    """
    urgent, need = 0, -1.0
    for s in range(rest.shape[0]):
        if rest[s] > 0.0 and rest[s] / largest[s] > need:
            urgent, need = s, rest[s] / largest[s]
    score[:] = -1.0
    for other in range(rest.shape[0]):
        x, y = min(urgent, other), max(urgent, other)
        for c in range(group[x, y, 0], group[x, y, 1]):
            if counts[kind[c]] > 0:
                score[c] = price[urgent] * min(caps[c, urgent], rest[urgent])
                if other != urgent:
                    score[c] += price[other] * min(caps[c, other], rest[other])


@inner
def slots_needed(rest: np.ndarray, whole: np.ndarray, beside: np.ndarray) -> int:
    """Return how many halves of GPUs the remaining demands need at least: a gpulet (part of a GPU) beside another
    counts as one half, a whole GPU as two.
    """
    total = 0
    for s in range(rest.shape[0]):
        if rest[s] > 0.0:
            halves = 2 * int(np.ceil(rest[s] / whole[s] - 1e-9))
            if beside[s] > 0.0:
                halves = min(halves, int(np.ceil(rest[s] / beside[s] - 1e-9)))
            total += halves
    return total


@inner
def space_needed(rest: np.ndarray, solo: np.ndarray, frac: np.ndarray, cost: np.ndarray) -> float:
    """Return a lower bound on the number of GPUs for the remaining demands. Each demand is served either by one gpulet
    (part of a GPU), at least as large as the smallest that can serve it alone, or by two or more. solo (S, P):
    requests/s of a service alone on a partition; frac (P): size of the partitions as fractions of a GPU, ascending;
    cost (S): least fraction of a GPU per request/s. P is 0 if the GPU types differ; then the bound is 0.
    """
    total = 0.0
    if frac.shape[0] == 0:
        return total
    for s in range(rest.shape[0]):
        if rest[s] > 0.0:
            need = max(2.0 * frac[0], rest[s] * cost[s])
            for p in range(frac.shape[0]):
                if solo[s, p] >= rest[s]:
                    need = min(need, frac[p])
                    break
            total += need
    return total


@inner
def last_gpu(caps: np.ndarray, kind: np.ndarray, group: np.ndarray, rest: np.ndarray, counts: np.ndarray) -> int:
    """Return a pattern (way to divide a GPU) with which one GPU serves all of the remaining demand; -1: there is none.
    group (S, S, 2): the patterns of each pair of services.
    """
    a = b = -1
    for s in range(rest.shape[0]):
        if rest[s] > 0.0:
            if a < 0:
                a = s
            elif b < 0:
                b = s
            else:
                return -1
    if b >= 0:
        for c in range(group[a, b, 0], group[a, b, 1]):
            if caps[c, a] >= rest[a] and caps[c, b] >= rest[b] and counts[kind[c]] > 0:
                return c
        return -1
    for other in range(rest.shape[0]):
        x, y = min(a, other), max(a, other)
        for c in range(group[x, y, 0], group[x, y, 1]):
            if caps[c, a] >= rest[a] and counts[kind[c]] > 0:
                return c
    return -1


@jit
def cover(
    caps: np.ndarray, kind: np.ndarray, group: np.ndarray, limits: np.ndarray, prices: np.ndarray, worth: np.ndarray,
    solo: np.ndarray, frac: np.ndarray, cost: np.ndarray, demand: np.ndarray, counts: np.ndarray, chosen: np.ndarray,
    budget: int,
) -> int:  # fmt: skip
    """Choose patterns (ways to divide a GPU) that together serve `demand` with `counts` GPUs of each type, and write
    them to `chosen`, one for each GPU; -1: the GPU is not used.

    Axes: C patterns, S services, L price vectors, T GPU types. caps (C, S), kind (C): the capacities and the GPU type
    of each pattern; group as in `last_gpu`; limits (3, S): the most that a service gets from a whole GPU, from a gpulet
    beside another service's, and from any pattern; prices (L, S), worth (L, T); solo, frac and cost as in
    `space_needed`. `budget`: how many patterns may be tried. Returns FOUND, NONE (proven that no set of patterns serves
    the demand) or LIMIT.
    """
    levels, S = counts.sum(), demand.shape[0]
    price = prices[bound_of(prices, worth, demand, counts)[1]] + 1e-9 / limits[2]
    rest = np.zeros((levels + 1, S))
    left = np.zeros((levels + 1, counts.shape[0]), np.int64)
    score = np.empty((levels, caps.shape[0]))
    rest[0], left[0] = demand, counts
    chosen[:] = -1
    depth, tries = 0, 0
    space = space_needed(demand, solo, frac, cost)
    if slots_needed(demand, limits[0], limits[1]) > 2 * levels or space > levels + 1e-9:
        return NONE
    if levels > 1:
        open_node(caps, kind, group, limits[2], price, rest[0], left[0], score[0])
    else:
        chosen[0] = last_gpu(caps, kind, group, demand, counts)
        return FOUND if chosen[0] >= 0 else NONE
    while depth >= 0:
        c = int(np.argmax(score[depth]))
        if score[depth, c] < 0.0:
            chosen[depth] = -1
            depth -= 1
            continue
        score[depth, c] = -1.0
        tries += 1
        if tries > budget:
            return LIMIT
        done = True
        for s in range(S):
            r = rest[depth, s] - caps[c, s]
            rest[depth + 1, s] = r if r > 1e-9 * demand[s] else 0.0
            done = done and rest[depth + 1, s] == 0.0
        chosen[depth] = c
        if done:
            return FOUND
        left[depth + 1] = left[depth]
        left[depth + 1, kind[c]] -= 1
        if depth + 2 == levels:
            chosen[depth + 1] = last_gpu(caps, kind, group, rest[depth + 1], left[depth + 1])
            if chosen[depth + 1] >= 0:
                return FOUND
        elif (
            slots_needed(rest[depth + 1], limits[0], limits[1]) <= 2 * (levels - depth - 1)
            and space_needed(rest[depth + 1], solo, frac, cost) <= levels - depth - 1 + 1e-9
            and may_fit(prices, worth, rest[depth + 1], left[depth + 1])
        ):
            depth += 1
            open_node(caps, kind, group, limits[2], price, rest[depth], left[depth], score[depth])
            continue
        chosen[depth] = -1
    return NONE
