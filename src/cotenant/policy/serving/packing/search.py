"""The compiled search of the packing planners: it places one service (`place`), builds a packing of all services
(`build`), and searches for a packing at higher and higher rates (`climb`).

`climb` decides whether the rates are feasible. It starts at low rates, raises them step by step by one common factor,
and stops when the requested rates are reached. The steps depend only on the ratios of the rates. So if some rates are
feasible, these rates times any factor below 1 are feasible, too: the steps are the same and end earlier.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from cotenant.policy.compiled import CACHED, bare, inner, jit
from cotenant.policy.serving.packing.kernel import (
    INF,
    NOWHERE,
    SLOT0,
    SLOT2,
    State,
    Tables,
    batch_ms,
    clear_gpu,
    copy_gpu,
    most,
    seat,
    settle,
    spare,
)

# options with which numba compiles functions that create arrays, or that call such functions
counted = njit(cache=CACHED, nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
# number of bisection steps in the search for the largest rate that a gpulet can serve; they leave an error of 1 %
STEPS = np.int64(7)
COARSE = np.int64(4)  # number of bisection steps in the search for a rate when gpulets are only compared
JUST = 1.0 - 1e-6  # the capacity of a gpulet is multiplied by this; at its exact capacity, rounding could break an SLO
GALLOP = np.array([0.4, 0.55, 0.65, 0.72, 0.78, 0.83, 0.87, 0.91, 0.94, 0.97, 1.0])
ORDERS = 5


@inner
def uniform(rng: np.ndarray) -> float:
    """Return the next number in [0, 1) of an xorshift generator whose state is rng[0] (uint64)."""
    x = rng[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    rng[0] = x
    return float(x >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@inner
def free_fraction(T: Tables, A: State, g: int) -> tuple[float, int, int]:
    """Return (fraction that is not assigned, number of gpulets, first free slot for a gpulet or -1) of GPU g, which is
    divided into gpulets.
    """
    used, lets, slot = 0.0, 0, -1
    for j in range(A.shape[1]):
        if A[g, j].part >= 0:
            used += T.size[T.gpu_type[g], A[g, j].part].frac
            lets += T.size[T.gpu_type[g], A[g, j].part].procs
        elif slot < 0:
            slot = j
    return 1.0 - used, lets, slot


@inner
def consumed(T: Tables, t: int, p: int, lets: int) -> float:
    """Return the fraction of a GPU that a new gpulet (part of the GPU) takes: of the SMs or of the largest number of
    gpulets, whichever is larger. A GPU that is already in use costs a little less.
    """
    return max(T.size[t, p].frac, T.size[t, p].procs / T.gpu[t].lets) + (0.02 if lets == 0 else 0.0)


@inner
def can_share(T: Tables, A: State, g: int, j: int, s: int) -> bool:
    """Whether batches of one request, of service s and of all services on gpulet j, would fit together in half of the
    tightest SLO, which is a cheap first test.
    """
    if A[g, j].count == 0 or A[g, j].count >= T.seats or T.size[T.gpu_type[g], A[g, j].part].procs > 1:
        return False
    if T.svc[A[g, j].svc[0]].group != T.svc[s].group:
        return False
    t, p = T.gpu_type[g], A[g, j].part
    slo, work = T.svc[s].slo, batch_ms(T, t, T.svc[s].model, p, 1, -1.0)
    for k in range(A[g, j].count):
        if A[g, j].svc[k] == s:
            return False
        slo = min(slo, T.svc[A[g, j].svc[k]].slo)
        work += batch_ms(T, t, T.svc[A[g, j].svc[k]].model, p, 1, -1.0)
    return 2.0 * work <= slo


@inner
def raise_seats(T: Tables, A: State, B: State, s: int, r: float) -> float:
    """Give service s, on the gpulets (parts of GPUs) where it already is, as much of rate r as they can serve. Returns
    what remains of r.
    """
    for g in range(A.shape[0]):
        for j in range(A.shape[1]):
            for k in range(A[g, j].count):
                if A[g, j].svc[k] == s:
                    q = min(r, spare(T, A, g, j, s))
                    if q > 1e-3 * r:
                        r -= most(T, A, B, g, j, A[g, j].part, s, q, STEPS)
                    break
    return r


@counted
def whole_fit(
    T: Tables, A: State, B: State, s: int, r: float, used: int, limit: int, noise: float, rng: np.ndarray
) -> bool:
    """Place the whole rate r of service s on the one gpulet (part of a GPU) that costs least. Returns False, with
    nothing changed, if no gpulet can serve it.
    """
    best, bg, bj, bp = INF, NOWHERE, NOWHERE, NOWHERE
    fresh = np.zeros(T.gpu.shape[0], np.bool_)
    tests = 0
    for back in range(A.shape[0]):
        g = used - 1 - back if back < used else back
        t = T.gpu_type[g]
        free, lets, slot = free_fraction(T, A, g)
        if lets == 0:
            if fresh[t]:
                continue
            fresh[t] = True
        if tests > limit and lets > 0:
            continue
        for j in range(A.shape[1]):
            if lets == 0 or not can_share(T, A, g, j, s) or spare(T, A, g, j, s) < r:
                continue
            cost = 0.9 * r * T.svc[s].cost * (1.0 + noise * uniform(rng))
            if cost < best:
                copy_gpu(A, g, B, SLOT0)
                tests += 1
                if seat(T, A, g, j, A[g, j].part, s, r):
                    best, bg, bj, bp = cost, g, j, A[g, j].part
                copy_gpu(B, SLOT0, A, g)
        if slot < 0 or lets >= T.gpu[t].lets:
            continue
        for p in range(T.size.shape[1]):
            if not T.size[t, p].allowed or T.size[t, p].frac > free + 1e-9 or T.cap[t, s, p] < r:
                continue
            cost = consumed(T, t, p, lets) * (1.0 + noise * uniform(rng))
            if cost < best:
                copy_gpu(A, g, B, SLOT0)
                tests += 1
                if seat(T, A, g, slot, p, s, r):
                    best, bg, bj, bp = cost, g, slot, p
                copy_gpu(B, SLOT0, A, g)
    if bg < 0:
        return False
    return seat(T, A, bg, bj, bp, s, r)


@counted
def part_fit(
    T: Tables, A: State, B: State, s: int, r: float, used: int, limit: int, noise: float, rng: np.ndarray
) -> float:
    """Place a part of rate r of service s where it serves most for the GPU fraction that it takes. Returns the rate
    placed; 0: none.
    """
    best, bg, bj, bp = 0.0, NOWHERE, NOWHERE, NOWHERE
    fresh = np.zeros(T.gpu.shape[0], np.bool_)
    tests = 0
    for back in range(A.shape[0]):
        g = used - 1 - back if back < used else back
        t = T.gpu_type[g]
        free, lets, slot = free_fraction(T, A, g)
        if lets == 0:
            if fresh[t]:
                continue
            fresh[t] = True
        if tests > limit and lets > 0:
            continue
        for j in range(A.shape[1]):
            value = 0.7 * (1.0 + noise * uniform(rng))
            if lets > 0 and value > best and can_share(T, A, g, j, s):
                q = min(r, spare(T, A, g, j, s))
                if q * T.svc[s].cost < 0.05:
                    continue  # for a rate this small, it is not worth while to put the service on another gpulet
                tests += 1
                copy_gpu(A, g, B, SLOT2)
                q = most(T, A, B, g, j, A[g, j].part, s, q, COARSE)
                copy_gpu(B, SLOT2, A, g)
                if q * T.svc[s].cost >= 0.05:
                    best, bg, bj, bp = value, g, j, A[g, j].part
        if slot < 0 or lets >= T.gpu[t].lets:
            continue
        for p in range(T.size.shape[1]):
            if not T.size[t, p].allowed or T.size[t, p].frac > free + 1e-9 or T.cap[t, s, p] <= 0.0:
                continue
            take = consumed(T, t, p, lets)
            if min(r, T.cap[t, s, p]) * T.svc[s].cost / take * (1.0 + noise) <= best:
                continue
            tests += 1
            copy_gpu(A, g, B, SLOT2)
            q = most(T, A, B, g, slot, p, s, min(r, T.cap[t, s, p] * JUST), COARSE)
            copy_gpu(B, SLOT2, A, g)
            value = q * T.svc[s].cost / take * (1.0 + noise * uniform(rng))
            if value > best:
                best, bg, bj, bp = value, g, slot, p
    if bg < 0:
        return 0.0
    if A[bg, bj].part >= 0:
        r = min(r, spare(T, A, bg, bj, s))
    else:
        r = min(r, T.cap[T.gpu_type[bg], s, bp] * JUST)
    return most(T, A, B, bg, bj, bp, s, r, STEPS)


@counted
def place(
    T: Tables, A: State, B: State, s: int, r: float, whole: float, limit: int, noise: float, rng: np.ndarray
) -> float:
    """Place rate r of service s, whose full rate is `whole`. Returns the rate that was not placed."""
    tiny = 1e-6 * whole
    r = raise_seats(T, A, B, s, r)
    used = SLOT0
    while r > tiny:
        for g in range(used, A.shape[0]):
            for j in range(A.shape[1]):
                if A[g, j].count > 0:
                    used = g + 1
        if whole_fit(T, A, B, s, r, used, limit, noise, rng):
            return 0.0
        q = part_fit(T, A, B, s, r, used, limit, noise, rng)
        if q <= tiny:
            return r
        r -= q
    return 0.0


@counted
def held(A: State, services: int) -> np.ndarray:
    """Return (S,): the requests/s that each service has on all gpulets together."""
    total = np.zeros(services)
    for g in range(A.shape[0]):
        for j in range(A.shape[1]):
            for k in range(A[g, j].count):
                total[A[g, j].svc[k]] += A[g, j].rate[k]
    return total


@counted
def order_of(T: Tables, rates: np.ndarray, variant: int, rng: np.ndarray) -> np.ndarray:
    """Return the services in the order of number `variant`: by demand, by SLO, by rate x SLO, otherwise by demand with
    noise.
    """
    key = np.empty(rates.shape[0])
    for s in range(rates.shape[0]):
        demand = rates[s] * T.svc[s].cost
        if variant == 0:
            key[s] = -demand
        elif variant == 1:
            key[s] = T.svc[s].slo
        elif variant == 2:
            key[s] = rates[s] * T.svc[s].slo
        else:
            key[s] = -demand * (0.3 + uniform(rng))
    return np.argsort(key, kind="mergesort")


@jit
def fill(
    T: Tables, A: State, B: State, rates: np.ndarray, order: np.ndarray, limit: int, noise: float, rng: np.ndarray,
    left: np.ndarray,
) -> float:  # fmt: skip
    """Place the rates that services still lack, in the given order of services. `left[S]` gets the rates that were not
    placed. Returns the cost of these rates in GPUs.
    """
    missing = 0.0
    have = held(A, rates.shape[0])
    for i in range(order.shape[0]):
        s = order[i]
        lack = rates[s] - have[s]
        left[s] = place(T, A, B, s, lack, rates[s], limit, noise, rng) if lack > 1e-6 * rates[s] else 0.0
        missing += left[s] * T.svc[s].cost
    return missing


@inner
def ruin(T: Tables, A: State, rng: np.ndarray, services: int) -> None:
    """Remove everything from one or two random GPUs; or everything from one GPU, and one service from all others."""
    n = A.shape[0]
    dice = uniform(rng)
    clear_gpu(A, int(uniform(rng) * n))
    if dice < 0.5:
        clear_gpu(A, int(uniform(rng) * n))
    elif dice < 0.75:
        s = int(uniform(rng) * services)
        for g in range(n):
            for j in range(A.shape[1]):
                drop_seat(A, g, j, s)
            settle(T, A, g, 1.0)


@inner
def drop_seat(A: State, g: int, j: int, s: int) -> None:
    """Remove service s from gpulet j (a part) of GPU g; a gpulet that becomes empty is removed, too."""
    for k in range(A[g, j].count):
        if A[g, j].svc[k] == s:
            last = A[g, j].count - 1
            A[g, j].svc[k] = A[g, j].svc[last]
            A[g, j].rate[k] = A[g, j].rate[last]
            A[g, j].count = last
            if last == 0:
                A[g, j].part = -1
                A[g, j].press = 0.0
            return


@inner
def copy_all(a: State, b: State) -> None:
    """Copy the state of every GPU of `a` to `b`."""
    for g in range(a.shape[0]):
        copy_gpu(a, g, b, g)


@bare
def empty_all(a: State) -> None:
    """Remove all gpulets of every GPU."""
    for g in range(a.shape[0]):
        clear_gpu(a, g)


@jit
def build(
    T: Tables, A: State, B: State, rates: np.ndarray, limit: int, variants: int, rng: np.ndarray, left: np.ndarray
) -> bool:
    """Build a packing on empty GPUs, with up to `variants` different orders of the services, until all rates are
    placed.
    """
    for variant in range(variants):
        empty_all(A)
        order = order_of(T, rates, variant, rng)
        if fill(T, A, B, rates, order, limit, 0.0 if variant < 3 else 0.3, rng, left) <= 0.0:
            return True
    return False


@jit
def climb(
    T: Tables, A: State, B: State, C: State, best: State, direction: np.ndarray, need: float, bound: float,
    budget: int, limit: int, rng: np.ndarray,
) -> float:  # fmt: skip
    """Raise the common factor on the rates `direction` until it reaches `need`, or until `budget` packings have been
    tried. Returns the factor reached; its packing is in `best`. The walk itself does not depend on `need`.
    """
    reached = 0.0
    left = np.zeros(direction.shape[0])
    empty_all(best)
    for step in range(GALLOP.shape[0]):
        factor = GALLOP[step] * bound
        if not build(T, A, B, direction * factor, limit, ORDERS, rng, left):
            break
        copy_all(A, best)
        reached = factor
        if reached >= need:
            return reached
    copy_all(best, C)
    now = INF  # number of GPUs that would serve what packing C lacks of this step's rates
    for _ in range(budget):
        rates = direction * (reached * 1.01 if reached > 0.0 else 0.2 * bound)
        copy_all(C, A)
        if now < INF:
            ruin(T, A, rng, direction.shape[0])
        order = order_of(T, rates, 3, rng)
        lack = fill(T, A, B, rates, order, limit, 0.4, rng, left)
        if lack <= 0.0:
            copy_all(A, best)
            copy_all(A, C)
            now = INF
            reached = reached * 1.01 if reached > 0.0 else 0.2 * bound
            if reached >= need:
                return reached
        elif lack <= now * 1.02:
            now = lack
            copy_all(A, C)
    return reached
