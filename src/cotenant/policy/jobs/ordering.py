"""Orderings: which job goes first. An ordering computes a *key* for each job, in compiled code; smaller keys go first.
ORDERINGS is the registry.

The job's priority comes before the key (larger first); after the key come the arrival and the number of the job.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cotenant.policy.compiled import inner
from cotenant.policy.jobs.arrays import Array, Demand


class Ordering(NamedTuple):
    """One ordering: its number in compiled code, and its description."""

    code: int
    summary: str


ORDERINGS: dict[str, Ordering] = {
    "fifo": Ordering(0, "first come, first served"),
    "sjf": Ordering(1, "shortest job first, by its whole run time"),
    "srtf": Ordering(2, "shortest remaining run time first"),
    "srsf": Ordering(3, "shortest remaining service first: remaining run time x GPUs"),
    "las": Ordering(4, "least attained service first: GPU-time received so far"),
    "las-queues": Ordering(5, "least attained service in discrete queues, first come first served in each"),
    "gittins": Ordering(6, "largest Gittins index of the distribution of GPU-time first"),
    "ftf": Ordering(7, "finish-time fairness: the job treated worst goes first"),
    "ftf-public": Ordering(8, "the public Synergy simulator's inverted finish-time fairness, for comparison"),
    "drf": Ordering(9, "smallest dominant share of ideal demand first"),
    "tetris": Ordering(10, "smallest demand x remaining run time first"),
    "smallest-gang": Ordering(11, "fewest GPUs first; needs no run times"),
}
FIFO, SJF, SRTF, SRSF, LAS, LAS_QUEUES, GITTINS, FTF, FTF_PUBLIC, DRF, TETRIS, SMALLEST_GANG = range(12)
# priority of a job that started by a reservation and keeps its GPUs until it ends; it is above all other priorities
HELD_PRIORITY = np.iinfo(np.int64).max
#: priority of a job that has a reservation (it has waited too long) and does not run yet
RESERVED_PRIORITY = HELD_PRIORITY - 1


class Context(NamedTuple):
    """What the ordering's keys need besides the jobs: limits of queues, the Gittins table, and the number of GPUs in
    the cluster.
    """

    # f8[Q], increasing: a job moves to the next queue when it has attained one of these numbers of GPU-seconds
    queue_limits_gpu_s: Array
    # f8[S], increasing: a job that has attained at least gittins_gpu_s[i] GPU-seconds, but less than entry i + 1, has
    # the Gittins index gittins_index[i]
    gittins_gpu_s: Array
    gittins_index: Array
    cluster_gpus: float
    #: a job gets a reservation this many seconds after its last run, or after its arrival; infinity: no job gets one
    reserve_after_s: float


@inner
def key(code: int, now: float, active: int, job: int, jobs: Array, demand: Demand, context: Context) -> float:
    """The job's key at time `now` (seconds) among `active` unfinished jobs.

    Sources: las, las-queues, gittins: Tiresias (NSDI'19); ftf: Themis (NSDI'20), rho = T_shared / T_ideal with
    T_ideal the isolated run time on a 1/active share of the cluster; drf: Ghodsi et al. (NSDI'11), static shares;
    tetris: Grandl et al. (SIGCOMM'14) as Synergy uses it.
    """
    typ = jobs[job].type
    gpus = demand.type[typ].gpus if demand.type[typ].part_milli == 0 else demand.type[typ].part_milli / 1000.0
    left = jobs[job].total - jobs[job].done
    if code == SJF:
        return float(demand.type[typ].key_s * jobs[job].total)
    if code == SRTF:
        return float(demand.type[typ].key_s * left)
    if code == SRSF:
        return float(demand.type[typ].key_s * left * gpus)
    if code == LAS:
        return float(jobs[job].attained_s * gpus)
    if code == LAS_QUEUES:
        return float(np.searchsorted(context.queue_limits_gpu_s, jobs[job].attained_s * gpus, side="right"))
    if code == GITTINS:
        i = np.searchsorted(context.gittins_gpu_s, jobs[job].attained_s * gpus, side="right") - 1
        return float(-context.gittins_index[max(i, 0)])
    if code in (FTF, FTF_PUBLIC):
        shared = now - jobs[job].arrival_s + demand.type[typ].key_s * left
        isolated = demand.type[typ].isolated_s * jobs[job].total
        if code == FTF_PUBLIC:
            return float(shared / isolated)
        return float(-shared / (isolated * max(1.0, gpus * active / context.cluster_gpus)))
    if code == DRF:
        return float(demand.type[typ].dominant)
    if code == SMALLEST_GANG:
        return float(gpus)
    if code == TETRIS:
        return float(demand.type[typ].size * (demand.type[typ].key_s * left))
    return 0.0


@inner
def rank(now: float, job: int, jobs: Array, context: Context) -> int:
    """Return the number by which jobs are ordered before the key: the job's priority, or RESERVED_PRIORITY once the job
    has waited for longer than `reserve_after_s` since its last run.

    A job that runs by its reservation ranks above those that still wait.
    """
    if jobs[job].reserved:
        return int(HELD_PRIORITY)
    if now - jobs[job].last_run_s > context.reserve_after_s:
        return int(RESERVED_PRIORITY)
    return int(jobs[job].priority)


@inner
def _goes_first(a: int, b: int, jobs: Array) -> bool:
    if jobs[a].rank != jobs[b].rank:
        return bool(jobs[a].rank > jobs[b].rank)
    if jobs[a].key != jobs[b].key:
        return bool(jobs[a].key < jobs[b].key)
    return a < b  # the job that arrived first goes first, since jobs are numbered by arrival


@inner
def sort_jobs(order: Any, n: int, jobs: Array, scratch: Any) -> None:
    """Sort order[:n] in place by a natural merge sort, which needs one comparison per job if the array is already
    sorted.
    """
    while True:
        runs = 0
        begin = 0
        out = 0
        while begin < n:
            middle = begin + 1
            while middle < n and not _goes_first(order[middle], order[middle - 1], jobs):
                middle += 1
            end = middle
            if middle < n:
                end = middle + 1
                while end < n and not _goes_first(order[end], order[end - 1], jobs):
                    end += 1
            i, k = begin, middle
            while out < end:
                if k >= end or (i < middle and not _goes_first(order[k], order[i], jobs)):
                    scratch[out] = order[i]
                    i += 1
                else:
                    scratch[out] = order[k]
                    k += 1
                out += 1
            runs += 1
            begin = end
        for i in range(n):
            order[i] = scratch[i]
        if runs <= 1:
            return


@inner
def order_jobs(
    code: int, now: float, order: Any, n: int, jobs: Array, demand: Demand, context: Context, scratch: Any
) -> None:  # fmt: skip
    """Sort order[:n] for time `now`.

    order[:n] has the order of the last call, with new jobs at its end. `dirty` marks jobs whose key may have changed
    since; it is cleared. Changed jobs are sorted separately and merged in, since most jobs have not changed.
    """
    still = 0
    moved = 0
    half = len(scratch) // 2
    for i in range(n):
        job = order[i]
        before_rank, before_key = jobs[job].rank, jobs[job].key
        if jobs[job].dirty:
            jobs[job].dirty = False
            jobs[job].key = key(code, now, n, job, jobs, demand, context)
            jobs[job].rank = rank(now, job, jobs, context)
            scratch[half + moved] = job
            moved += 1
            continue
        jobs[job].rank = rank(now, job, jobs, context)
        if jobs[job].rank != before_rank or jobs[job].key != before_key:
            scratch[half + moved] = job
            moved += 1
        else:
            order[still] = job
            still += 1
    if moved == 0:
        return
    fresh = scratch[half : half + moved]
    sort_jobs(fresh, moved, jobs, scratch[:half])
    i, k, out = still - 1, moved - 1, n - 1
    while k >= 0:  # the changed jobs are merged in from the back, so that no unread job is overwritten
        if i >= 0 and _goes_first(fresh[k], order[i], jobs):
            order[out] = order[i]
            i -= 1
        else:
            order[out] = fresh[k]
            k -= 1
        out -= 1


def gittins_table(gpu_seconds: Array, points: int = 512) -> tuple[Array, Array]:
    """Return attained GPU-seconds a[S] and the Gittins index[S] there, for jobs whose total GPU time has the
    distribution of the sample.

    index(a) = max over D of P(X - a <= D | X > a) / E[min(X - a, D) | X > a] (Gittins 1979; Tiresias, NSDI'19). X, the
    total GPU time of a job, is distributed as the sample `gpu_seconds`. The values of D are those for which a + D is a
    later entry of a[S].
    """
    sample = np.sort(np.asarray(gpu_seconds, dtype=np.float64))
    # The Gittins index is computed only at values of the sample. Just before such a value, D and so the divisor could
    # be almost 0, of which only rounding errors would remain.
    ends = np.unique(np.quantile(sample, np.linspace(0, 1, points), method="lower"))
    attained = np.unique(np.concatenate([[0.0], ends]))
    index = np.zeros(len(attained))
    sums = np.concatenate([[0.0], np.cumsum(sample)])
    below_end = np.searchsorted(sample, ends, side="right")
    for i, a in enumerate(attained):
        first = int(np.searchsorted(sample, a, side="right"))
        alive = len(sample) - first
        if alive == 0:  # no job of the sample ran for this long, so a job that runs for this long goes last
            continue
        later = ends > a
        served = below_end[later] - first
        spent = sums[below_end[later]] - sums[first] - a * served + (ends[later] - a) * (alive - served)
        index[i] = float(np.max(served / spent)) if later.any() else 0.0
    return attained, index
