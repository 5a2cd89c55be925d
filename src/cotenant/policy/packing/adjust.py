"""Compiled steps after a search: more headroom, and packings that keep what an older plan had."""

from __future__ import annotations

import numpy as np

from cotenant.policy.compiled import bare, inner, jit
from cotenant.policy.packing.kernel import NOWHERE, SLOT0, SLOT1, State, Tables, batch_ms, copy_gpu, room, settle


@bare
def widen(T: Tables, A: State, B: State, factors: np.ndarray) -> None:
    """Give each GPU the batches of its rates times the largest factor that still settles, then each of its gpulets as
    much more as its neighbours allow: headroom for bursts. The assigned rates stay what they are."""
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


@inner
def scale_gpu(A: State, B: State, g: int, only: int, factor: float) -> None:
    """Set rates to `factor` times those in B[0] (all gpulets), or times their own (gpulet `only`)."""
    for j in range(A.shape[1]):
        for k in range(A[g, j].count):
            if only < 0:
                A[g, j].rate[k] = B[0, j].rate[k] * factor
            elif j == only:
                A[g, j].rate[k] *= factor


@bare
def settle_all(T: Tables, A: State) -> bool:
    """Settle every GPU at its rates; False when one does not."""
    for g in range(A.shape[0]):  # noqa: SIM110 - a generator does not compile
        if not settle(T, A, g, 1.0):
            return False
    return True


@bare
def shrink_to_fit(T: Tables, A: State, B: State) -> bool:
    """Lower the rates of GPUs that do not settle, all seats of one by a common factor, until each does."""
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
    """Requests/s of each gpulet of a pattern of one or two gpulets on GPU g."""
    t = T.gpu_type[g]
    out = np.zeros(parts.shape[0])
    for j in range(parts.shape[0]):
        x = -1.0
        if parts.shape[0] == 2:
            i = 1 - j
            x = T.cell[t, T.svc[services[i]].model, batches[i]].other * T.size[t, parts[i]].frac
        out[j] = batches[j] * 1000.0 / batch_ms(T, t, T.svc[services[j]].model, parts[j], batches[j], x)
    return out
