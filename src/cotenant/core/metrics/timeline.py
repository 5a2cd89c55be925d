"""Who held what when: the events of a record as intervals per job, and as sums over the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cotenant.core.events import Kind
from cotenant.core.record.record import Record

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Resource = Literal["gpu", "cpu", "memory"]

# after these a job holds a share; after every other kind it holds none
HOLDING = (Kind.START, Kind.RESUME, Kind.MOVE, Kind.RESIZE, Kind.PROFILE, Kind.REPARTITION)


@dataclass(frozen=True)
class Timeline:
    """The events in time order (length n) with what each changed, and where each one's effect ends.

    An event's effect lasts until the job's next event, or the end of the record.
    """

    record: Record
    length_s: Floats  #: length n; until the job's next event
    holding: Bools  #: length n; whether the job holds a share from here on
    previous: NDArray[np.int32]  #: length n; row of the job's event before this one; -1 for its first
    first_s: float  #: first arrival
    end_s: float  #: last finish where every job is done or rejected, else the end of the record

    def held(self, what: Resource, useful: bool = False) -> Floats:
        """GPUs, cores or bytes that the job holds from each event on, length n.

        `useful`: of cores and bytes only what the job can put to use. Computed anew at each call: kept, these arrays
        would be most of the memory that a large run takes.
        """
        record, events = self.record, self.record.events
        if what == "gpu":
            where = record.placements
            held = record.job("gpus")[events.job] if where is None else where.gpus_held()
        elif what == "cpu":
            held = events.cpu_milli * 1e-3
        else:
            held = events.memory_mb * 1e6
        held = held * self.holding
        if useful and what != "gpu":
            ideal = record.job("ideal_cpus" if what == "cpu" else "ideal_memory_bytes")
            # fmin passes over NaN: where the ideal is not known, all that is held counts as useful
            held = np.fmin(held, ideal[events.job])
        return np.asarray(held)

    def change(self, held: Floats) -> Floats:
        """What each event changed in the cluster's sum of `held`, an array over the events."""
        change = held.copy()
        later = np.flatnonzero(self.previous >= 0)
        change[later] -= held[self.previous[later]]
        return change

    def integral(self, held: Floats) -> float:
        """Integral over time of the cluster's sum of `held` (unit of `held` x seconds)."""
        # not np.dot: its sum depends on the number of threads
        return float((held * self.length_s).sum())


def order_by_job(job: NDArray[np.int32]) -> NDArray[np.int32]:
    """Rows sorted by job, each job's rows kept in order: two passes of numpy's radix sort for 16-bit keys."""
    low = np.argsort((job & 0xFFFF).astype(np.uint16), kind="stable").astype(np.int32)
    high = (job >> 16).astype(np.uint16)
    if not high.any():
        return low
    return np.asarray(low[np.argsort(high[low], kind="stable")])


def build_timeline(record: Record) -> Timeline:
    """The timeline of a record; the one costly step that all metrics share."""
    events, n = record.events, len(record.events)
    order = order_by_job(events.job)
    same = np.diff(events.job[order]) == 0
    earlier, later = order[:-1][same], order[1:][same]
    previous = np.full(n, -1, dtype=np.int32)
    previous[later] = earlier
    length = record.end_s - events.time_s
    length[earlier] = events.time_s[later] - events.time_s[earlier]
    return Timeline(
        record=record,
        length_s=length,
        holding=np.isin(events.kind, [int(kind) for kind in HOLDING]),
        previous=previous,
        first_s=float(record.job("arrival_s").min()) if record.jobs.height else 0.0,
        end_s=_end(record),
    )


def _end(record: Record) -> float:
    kind = record.events.kind
    over = (kind == Kind.FINISH) | (kind == Kind.REJECT)
    finished = record.events.time_s[kind == Kind.FINISH]
    if len(finished) and int(over.sum()) >= record.jobs.height:
        return float(finished[-1])
    return record.end_s


def mean_in_bins(times_s: NDArray[Any], change: Floats, edges_s: Floats) -> Floats:
    """Time-weighted mean, in each bin, of the step function that changes by `change` at `times_s`.

    `times_s` ascending (length n, seconds), `edges_s` ascending (length bins + 1). Before the first time it is 0.
    """
    if len(times_s) == 0:
        return np.zeros(len(edges_s) - 1)
    value = np.cumsum(change)
    area = np.concatenate(([0.0], np.cumsum(value[:-1] * np.diff(times_s))))
    at_edges = np.interp(edges_s, times_s, area)
    # beyond the last time the value stays; np.interp holds the area flat there
    at_edges = at_edges + np.maximum(edges_s - times_s[-1], 0.0) * value[-1]
    widths = np.diff(edges_s)
    return np.asarray(np.divide(np.diff(at_edges), widths, out=np.zeros_like(widths), where=widths > 0))
