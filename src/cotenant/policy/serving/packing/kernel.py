"""The compiled core of the packing planners: what fits on a gpulet, given its neighbours.

A *gpulet* is a part of a GPU whose models take turns: one cycle runs one batch of each, and the length of the cycle is
its total work. So a gpulet gives a model `batch / work` requests per millisecond, and a request waits at most one cycle
before the cycle that serves it: `2 * work <= SLO` for every model on it. A *seat* is the place of one service on a
gpulet. *Pressure* is how much a gpulet slows down its neighbours on the GPU.

For given rates, every distinct vector of batches of a gpulet is tried, and the one with the least pressure on the
neighbours is kept. Less pressure never makes a neighbour slower. So raising the pressures of a GPU's gpulets from zero
to the first fixed point finds a consistent choice if there is one (`settle`).

Indices: t GPU type, g GPU, j gpulet slot, p partition, s service, k seat, b batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cotenant.core.serving import MOST_MODELS
from cotenant.policy.compiled import inner

INF = np.inf
EPS = 1e-9
# numba treats each integer constant of Python as a type of its own, and compiles a function again for every value that
# it is called with, so these constants are numpy integers
SLOT0: Any = np.int64(0)
SLOT1: Any = np.int64(1)
SLOT2: Any = np.int64(2)
NOWHERE: Any = np.int64(-1)


FEW_SEATS = 4

# One row for each (GPU type, model, batch). over: ms to build a batch; own, other: factors of the slowdown that the
# model's memory use causes for itself and for a neighbour.
CELL = np.dtype([("over", "f8"), ("own", "f8"), ("other", "f8")], align=True)
# One row for each GPU type. lets: largest number of gpulets on a GPU; slots, compute: memory slots and compute slices
# that all its MIG instances together may take.
GPU = np.dtype(
    [("alpha0", "f8"), ("margin", "f8"), ("mem_gpu", "f8"), ("mem_let", "f8"), ("net", "f8"), ("slots", "i8"),
     ("compute", "i8"), ("lets", "i8")],
    align=True,
)  # fmt: skip
# One row for each (GPU type, partition). kind: kind of the MIG instance of which the partition is a `share`; whole,
# slots, compute: part of the GPU's SMs, memory slots and compute slices that the instance takes; frac: part of the
# GPU's SMs that the partition takes with all its `procs` processes.
SIZE = np.dtype(
    [("frac", "f8"), ("share", "f8"), ("whole", "f8"), ("slots", "i8"), ("compute", "i8"), ("kind", "i8"),
     ("procs", "i8"), ("allowed", "i8")],
    align=True,
)  # fmt: skip
# One row for each service. cost: least fraction of a GPU per request/s; bits: size of a request; group: services may
# share a gpulet (part of a GPU) only if their groups are equal.
SVC = np.dtype(
    [("slo", "f8"), ("mem", "f8"), ("bits", "f8"), ("cost", "f8"), ("model", "i8"), ("group", "i8")], align=True
)


def let_rows(seats: int) -> np.dtype:
    """Return the type of record that describes a gpulet (part of a GPU) while a packing is built. If its partition runs
    several processes, one record stands for all of them. part: -1 if the slot is empty; inst: number of its MIG
    instance on the GPU; rate: requests/s assigned to each seat (place of a service).

    There are two types: a small one for few seats, because a search copies records all the time, and one for the most
    seats. There are no more because all functions are compiled for each type.
    """
    most = FEW_SEATS if seats <= FEW_SEATS else MOST_MODELS
    return np.dtype(
        [("part", "i8"), ("inst", "i8"), ("count", "i8"), ("work", "f8"), ("press", "f8"), ("svc", "i8", (most,)),
         ("batch", "i8", (most,)), ("rate", "f8", (most,))],
        align=True,
    )  # fmt: skip


class Tables(NamedTuple):
    """The tables of a serving planner, as arrays of the records above, so that kernels have few arguments.

    Axes: T GPU types, M models, P partitions, S services, N GPUs; B is the largest batch. lat (T, M, P, B+1): ms of a
    batch, inf if the profile has no value for it; cell (T, M, B+1); gpu (T); size (T, P); svc (S); cap (T, S, P):
    requests/s alone on a partition; gpu_type (N): type of each GPU; seats: how many services may share a gpulet;
    rising: whether a larger batch never causes less pressure.
    """

    lat: np.ndarray
    cell: np.ndarray
    gpu: np.ndarray
    size: np.ndarray
    svc: np.ndarray
    cap: np.ndarray
    gpu_type: np.ndarray
    seats: int
    rising: bool


State = np.ndarray  # (N, J): an array of let_rows, with a row for each gpulet of each GPU


@inner
def copy_gpu(a: State, g: int, b: State, h: int) -> None:
    """Copy the state of GPU g of `a` to GPU h of `b`."""
    for j in range(a.shape[1]):
        b[h, j] = a[g, j]


@inner
def clear_gpu(a: State, g: int) -> None:
    """Remove all gpulets from GPU g."""
    for j in range(a.shape[1]):
        a[g, j].part = -1
        a[g, j].count = 0
        a[g, j].press = 0.0
        a[g, j].work = 0.0


@inner
def batch_ms(T: Tables, t: int, m: int, p: int, b: int, x: float) -> float:
    """Return the milliseconds of a batch while the neighbours on the GPU slow it down by pressure x (below 0: there is
    no neighbour).
    """
    alpha = 1.0
    if x >= 0.0:
        alpha = T.gpu[t].alpha0 + T.cell[t, m, b].own * T.size[t, p].share + x
        if alpha < 1.0:
            alpha = 1.0
    return (T.lat[t, m, p, b] * alpha + T.cell[t, m, b].over) * T.gpu[t].margin


@inner
def try_cycle(
    T: Tables, A: State, g: int, j: int, x: float, cycle: float, slo: float, scale: float
) -> tuple[float, float]:
    """Try a cycle of `cycle` ms for a gpulet (part of a GPU): each service on it runs one batch of the requests that
    arrive in a cycle. Returns the time of all batches in ms (inf if it exceeds the cycle or an SLO) and the pressure
    (slowdown) that the gpulet causes for its neighbours on the GPU.
    """
    t, p = T.gpu_type[g], A[g, j].part
    top = T.cell.shape[2] - 1
    work, press = 0.0, 0.0
    for k in range(A[g, j].count):
        m = T.svc[A[g, j].svc[k]].model
        b = int(np.ceil(A[g, j].rate[k] * scale * cycle - EPS))
        if b < 1:
            b = 1
        if b > top:
            return INF, 0.0
        work += batch_ms(T, t, m, p, b, x)
        if work > cycle or 2.0 * work > slo:
            return INF, 0.0
        if T.cell[t, m, b].other > press:
            press = T.cell[t, m, b].other
    return work, press * T.size[t, p].share


@inner
def fit(T: Tables, A: State, g: int, j: int, x: float, scale: float) -> bool:
    """Choose batches of a gpulet (part of a GPU) for its rates, and set its work and its pressure (how much it slows
    down its neighbours). `scale` times the rates in requests/s gives the requests/ms to plan for. Returns False, with
    nothing changed, if no batches keep the SLOs.
    """
    n = A[g, j].count
    slo = INF
    for k in range(n):
        slo = min(slo, T.svc[A[g, j].svc[k]].slo)
    best_cycle, best_work, best_press, best_load = -1.0, 0.0, INF, INF
    scale /= T.size[T.gpu_type[g], A[g, j].part].procs
    for k in range(n):
        rate = A[g, j].rate[k] * scale
        found = False
        for b in range(1, T.cell.shape[2]):
            cycle = b / rate
            if found and T.rising:
                break  # larger batches slow the neighbours down no less, so they are not tried
            if n == 1:  # the common case of one service is computed here without a call
                t, p, m = T.gpu_type[g], A[g, j].part, T.svc[A[g, j].svc[0]].model
                work = batch_ms(T, t, m, p, b, x)
                if work > cycle or 2.0 * work > slo:
                    continue
                press = T.cell[t, m, b].other * T.size[t, p].share
            else:
                work, press = try_cycle(T, A, g, j, x, cycle, slo, scale)
                if work == INF:
                    continue
            found = True
            load = work / cycle
            if press < best_press - 1e-12 or (press < best_press + 1e-12 and load < best_load):
                best_cycle, best_work, best_press, best_load = cycle, work, press, load
    if best_cycle < 0.0:
        return False
    for k in range(n):
        A[g, j].batch[k] = max(1, int(np.ceil(A[g, j].rate[k] * scale * best_cycle - EPS)))
    A[g, j].work = best_work
    A[g, j].press = best_press
    return True


@inner
def neighbour_pressure(A: State, g: int, j: int) -> float:
    """Return how much the other gpulets (parts of the GPU) of the same MIG instance slow down gpulet j, as the sum of
    their pressures; -1 if it is alone.
    """
    x, others = 0.0, 0
    for i in range(A.shape[1]):
        if i != j and A[g, i].count > 0 and A[g, i].inst == A[g, j].inst:
            x += A[g, i].press
            others += 1
    return x if others > 0 else -1.0


@inner
def instance_room(T: Tables, A: State, g: int, j: int, q: int) -> bool:
    """Whether the MIG instance of gpulet j on GPU g has space for one more gpulet of size (partition) q. With q = -1:
    whether it has space for its present gpulets.
    """
    t, p = T.gpu_type[g], A[g, j].part
    share, memory = 0.0, 0.0
    if q >= 0:
        if T.size[t, q].kind != T.size[t, p].kind:
            return False
        share = T.size[t, q].share
    for i in range(A.shape[1]):
        if A[g, i].part < 0 or A[g, i].inst != A[g, j].inst:
            continue
        own = T.gpu[t].mem_let
        for k in range(A[g, i].count):
            own += T.svc[A[g, i].svc[k]].mem
        share += T.size[t, A[g, i].part].share
        memory += own * T.size[t, A[g, i].part].procs
    return share <= 1.0 + EPS and memory <= T.gpu[t].mem_gpu * T.size[t, p].slots / T.gpu[t].slots


@inner
def first_of_instance(A: State, g: int, j: int) -> bool:
    """Whether gpulet j is the first gpulet of its MIG instance on GPU g."""
    for i in range(j):  # noqa: SIM110 - a generator does not compile
        if A[g, i].part >= 0 and A[g, i].inst == A[g, j].inst:
            return False
    return True


@inner
def room(T: Tables, A: State, g: int) -> bool:
    """Whether the gpulets (parts) of GPU g stay within its limits of SMs, MIG geometry, number of gpulets, memory and
    network traffic.
    """
    t = T.gpu_type[g]
    whole, slots, compute, lets, traffic = 0.0, 0, 0, 0, 0.0
    for j in range(A.shape[1]):
        if A[g, j].part < 0:
            continue
        p = A[g, j].part
        lets += T.size[t, p].procs
        for k in range(A[g, j].count):
            traffic += T.svc[A[g, j].svc[k]].bits * A[g, j].rate[k]
        if first_of_instance(A, g, j):
            whole += T.size[t, p].whole
            slots += T.size[t, p].slots
            compute += T.size[t, p].compute
            if not instance_room(T, A, g, j, -1):
                return False
    if whole > 1.0 + EPS or lets > T.gpu[t].lets or traffic > T.gpu[t].net:
        return False
    return slots <= T.gpu[t].slots and compute <= T.gpu[t].compute


@inner
def open_let(T: Tables, A: State, g: int, j: int, p: int) -> None:
    """Make slot j of GPU g an empty gpulet of size (partition) p, in the first MIG instance that has space for it,
    otherwise in a new one.
    """
    A[g, j].part, A[g, j].count, A[g, j].inst = -1, 0, 0
    for i in range(A.shape[1]):
        if A[g, i].part >= 0 and A[g, i].inst >= A[g, j].inst:
            A[g, j].inst = A[g, i].inst + 1
    for i in range(A.shape[1]):
        if A[g, i].part >= 0 and instance_room(T, A, g, i, p):
            A[g, j].inst = A[g, i].inst
            break
    A[g, j].part = p


@inner
def settle(T: Tables, A: State, g: int, scale: float) -> bool:
    """Choose batches for all gpulets (parts) of GPU g that keep all SLOs together. Returns False, with the state
    undefined, if there are no such batches.
    """
    if not room(T, A, g):
        return False
    for j in range(A.shape[1]):
        A[g, j].press = 0.0
    for _ in range(40):
        moved = False
        for j in range(A.shape[1]):
            if A[g, j].count == 0:
                continue
            before = A[g, j].press
            if not fit(T, A, g, j, neighbour_pressure(A, g, j), scale * 1e-3 * (1.0 + 1e-7)):
                return False
            if A[g, j].press > before + 1e-12:
                moved = True
            else:
                A[g, j].press = max(before, A[g, j].press)
        if not moved:
            return True
    return False


@inner
def seat(T: Tables, A: State, g: int, j: int, p: int, s: int, q: float) -> bool:
    """Add q requests/s of service s to gpulet j (a part) of GPU g, which is created with partition p if the slot is
    empty. Returns whether batches exist that keep all SLOs of the GPU.
    """
    if A[g, j].part < 0:
        open_let(T, A, g, j, p)
    k = 0
    while k < A[g, j].count and A[g, j].svc[k] != s:
        k += 1
    if k == A[g, j].count:
        one = T.size[T.gpu_type[g], A[g, j].part].procs > 1
        if k >= T.seats or (k > 0 and (one or T.svc[A[g, j].svc[0]].group != T.svc[s].group)):
            return False
        A[g, j].svc[k] = s
        A[g, j].rate[k] = 0.0
        A[g, j].count = k + 1
    A[g, j].rate[k] += q
    return settle(T, A, g, 1.0)


@inner
def spare(T: Tables, A: State, g: int, j: int, s: int) -> float:
    """Return an upper bound of the requests/s that service s could still get on gpulet j: what it can serve in the time
    that the present rates leave free, if every service used its time as well as when it is alone on the partition.
    """
    t, p = T.gpu_type[g], A[g, j].part
    load = 0.0
    for k in range(A[g, j].count):
        load += A[g, j].rate[k] / T.cap[t, A[g, j].svc[k], p]
    return max(0.0, (1.0 - load) * T.cap[t, s, p])


@inner
def most(T: Tables, A: State, B: State, g: int, j: int, p: int, s: int, q: float, steps: int) -> float:
    """Find the largest rate of service s, up to q, that gpulet j (part of a GPU) can serve, by `steps` bisections. Adds
    the service to the gpulet at that rate, and returns the rate; 0, with nothing changed, if there is none.
    """
    copy_gpu(A, g, B, SLOT0)
    if seat(T, A, g, j, p, s, q):
        return q
    low, high = 0.0, q
    for _ in range(steps):
        mid = 0.5 * (low + high)
        copy_gpu(B, SLOT0, A, g)
        if seat(T, A, g, j, p, s, mid):
            low = mid
            copy_gpu(A, g, B, SLOT1)
        else:
            high = mid
    if low > 0.0:
        copy_gpu(B, SLOT1, A, g)
    else:
        copy_gpu(B, SLOT0, A, g)
    return low
