"""Compiled steps after a search: larger batches as headroom, and packings that keep the gpulets of an older plan. A
*gpulet* is a part of a GPU on which models take turns; it *settles* if batches exist that keep all SLOs there."""

from __future__ import annotations

import numpy as np

from cotenant.policy.compiled import bare, inner, jit
from cotenant.policy.serving.packing.kernel import (
    NOWHERE,
    SLOT0,
    SLOT1,
    SLOT2,
    State,
    Tables,
    batch_ms,
    copy_gpu,
    most,
    room,
    settle,
)

STEPS = np.int64(7)  # number of bisection steps in a search for the largest request rate; they leave an error of 1 %


@bare
def widen(T: Tables, A: State, B: State, factors: np.ndarray) -> None:
    """Choose batches that keep all SLOs even at higher request rates, as headroom for bursts. The rates are raised only
    while batches are chosen, and then set back.

    First, all rates of a GPU are multiplied by one factor, the largest of `factors` for which such batches exist. Then
    the rates of one gpulet (part of the GPU) after the other are multiplied by a further factor, the largest for which
    it and its neighbours keep their SLOs.
    """
    for g in range(A.shape[0]):
        copy_gpu(A, g, B, SLOT0)
        if not room(T, A, g):
            continue
        for i in range(factors.shape[0]):
            scale_gpu(A, B, g, NOWHERE, factors[i])
            if settle(T, A, g, 1.0):
                break
        copy_gpu(A, g, B, SLOT1)
        for j in range(A.shape[1]):
            for i in range(factors.shape[0]):
                scale_gpu(A, B, g, j, factors[i])
                if A[g, j].count > 0 and factors[i] > 1.0 and settle(T, A, g, 1.0):
                    copy_gpu(A, g, B, SLOT1)
                    break
                copy_gpu(B, SLOT1, A, g)
        scale_gpu(A, B, g, NOWHERE, 1.0)


@bare
def grow(T: Tables, A: State, B: State, order: np.ndarray, left: np.ndarray) -> None:
    """Make gpulets (parts of GPUs) larger for services whose rate was not placed completely, if the larger gpulets
    serve more of that rate.

    The search prefers the sizes that serve most per fraction of a GPU, although a gpulet beside which nothing else fits
    may as well be larger.
    """
    for i in range(order.shape[0]):
        s = order[i]
        for g in range(A.shape[0]):
            for j in range(A.shape[1]):
                if left[s] > 0.0 and has_seat(A, g, j, s):
                    grow_let(T, A, B, g, j, s, left)


@inner
def has_seat(A: State, g: int, j: int, s: int) -> bool:
    """Whether service s is on gpulet j of GPU g, one of the parts into which the GPU is divided."""
    for k in range(A[g, j].count):  # noqa: SIM110 - a generator does not compile
        if A[g, j].svc[k] == s:
            return True
    return False


@inner
def grow_let(T: Tables, A: State, B: State, g: int, j: int, s: int, left: np.ndarray) -> None:
    """Try the larger partitions for gpulet j (a part of GPU g) in turn, and keep each one with which it serves more of
    service s.
    """
    t = T.gpu_type[g]
    for p in range(T.size.shape[1]):
        larger = T.size[t, p].frac > T.size[t, A[g, j].part].frac
        if left[s] <= 0.0 or not larger or not T.size[t, p].allowed or T.cap[t, s, p] <= 0.0:
            continue
        copy_gpu(A, g, B, SLOT2)
        A[g, j].part = p
        q = 0.0
        if settle(T, A, g, 1.0):
            q = most(T, A, B, g, j, p, s, min(left[s], T.cap[t, s, p]), STEPS)
        if q > 0.0:
            left[s] -= q
        else:
            copy_gpu(B, SLOT2, A, g)


@inner
def scale_gpu(A: State, B: State, g: int, only: int, factor: float) -> None:
    """Set the request rates of GPU g to `factor` times the rates in B[0]. If `only` is 0 or more, multiply the rates of
    gpulet number `only` by `factor` instead.
    """
    for j in range(A.shape[1]):
        for k in range(A[g, j].count):
            if only < 0:
                A[g, j].rate[k] = B[0, j].rate[k] * factor
            elif j == only:
                A[g, j].rate[k] *= factor


@bare
def settle_all(T: Tables, A: State) -> bool:
    """Choose batches on every GPU for its request rates. Returns False if for some GPU there are no batches that keep
    the SLOs.
    """
    for g in range(A.shape[0]):  # noqa: SIM110 - a generator does not compile
        if not settle(T, A, g, 1.0):
            return False
    return True


@bare
def shrink_to_fit(T: Tables, A: State, B: State) -> bool:
    """On each GPU for which no batches keep the SLOs, lower all request rates by one factor, until batches exist that
    keep them. Returns whether every GPU has such batches.
    """
    for g in range(A.shape[0]):
        if settle(T, A, g, 1.0):
            continue
        low, high = 0.0, 1.0
        copy_gpu(A, g, B, SLOT0)
        for _ in range(12):
            mid = 0.5 * (low + high)
            copy_gpu(B, SLOT0, A, g)
            for j in range(A.shape[1]):
                for k in range(A[g, j].count):
                    A[g, j].rate[k] *= mid
            if settle(T, A, g, 1.0):
                low = mid
                copy_gpu(A, g, B, SLOT1)
            else:
                high = mid
        if low == 0.0:
            return False
        copy_gpu(B, SLOT1, A, g)
    return True


@jit
def pattern_caps(T: Tables, g: int, parts: np.ndarray, services: np.ndarray, batches: np.ndarray) -> np.ndarray:
    """Return how many requests/s each gpulet (part of a GPU) can serve, if GPU g is divided into these one or two
    gpulets.
    """
    t = T.gpu_type[g]
    out = np.zeros(parts.shape[0])
    for j in range(parts.shape[0]):
        x = -1.0
        if parts.shape[0] == 2:
            i = 1 - j
            x = T.cell[t, T.svc[services[i]].model, batches[i]].other * T.size[t, parts[i]].share
        ms = batch_ms(T, t, T.svc[services[j]].model, parts[j], batches[j], x)
        out[j] = batches[j] * 1000.0 / ms * T.size[t, parts[j]].procs
    return out
