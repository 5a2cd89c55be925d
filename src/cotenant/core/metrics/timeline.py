"""The events of a record as intervals per job, and as sums over the cluster."""

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

# after an event of one of these kinds the event's job holds GPUs; after all others it holds none
HOLDING = (Kind.START, Kind.RESUME, Kind.MOVE, Kind.RESIZE, Kind.PROFILE, Kind.REPARTITION)


@dataclass(frozen=True)
class Timeline:
    """The n events of a record in time order, with the effect of each (whether its job then holds GPUs) and how long
    the effect lasts.

    An event's effect lasts until the job's next event or the end of the record.
    """

    record: Record
    length_s: Floats  #: array of length n: time in s to the job's next event or the end of the record
    holding: Bools  #: array of length n: whether the event's job holds GPUs after the event
    previous: NDArray[np.int32]  #: array of length n: row of the job's previous event; -1 for its first
    first_s: float  #: first arrival
    end_s: float  #: last finish if every job is done or rejected, else the end of the record, in s

    def held(self, what: Resource, useful: bool = False) -> Floats:
        """Return the GPUs, cores or bytes that the event's job holds after each event, length n.

        `useful`: only the cores and bytes that the job can use. Computed at each call, since storing these arrays would
        dominate the memory of a large run.
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
            # fmin ignores NaN: if a job's ideal amount is unknown, all that it holds counts as useful
            held = np.fmin(held, ideal[events.job])
        return np.asarray(held)

    def change(self, held: Floats) -> Floats:
        """Return the change of the cluster's sum of `held` at each event."""
        change = held.copy()
        later = np.flatnonzero(self.previous >= 0)
        change[later] -= held[self.previous[later]]
        return change

    def integral(self, held: Floats) -> float:
        """Return the integral over time of the cluster's sum of `held`, in the unit of `held` x seconds."""
        # np.dot is not used, because its result depends on the number of threads
        return float((held * self.length_s).sum())


def order_by_job(job: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the rows of events sorted stably by job: two passes of numpy's radix sort for 16-bit keys."""
    low = np.argsort((job & 0xFFFF).astype(np.uint16), kind="stable").astype(np.int32)
    high = (job >> 16).astype(np.uint16)
    if not high.any():
        return low
    return np.asarray(low[np.argsort(high[low], kind="stable")])


def build_timeline(record: Record) -> Timeline:
    """Build the timeline of a record, the only expensive step shared by all metrics."""
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
    """Return the time-weighted mean, in each bin, of the step function that changes by `change` at `times_s`.

    `times_s` ascending (length n, seconds), `edges_s` ascending (length bins + 1). The function is 0 before the first
    time.
    """
    if len(times_s) == 0:
        return np.zeros(len(edges_s) - 1)
    value = np.cumsum(change)
    area = np.concatenate(([0.0], np.cumsum(value[:-1] * np.diff(times_s))))
    at_edges = np.interp(edges_s, times_s, area)
    # np.interp keeps the integral constant after the last time, but the value itself stays constant there, so the
    # integral grows
    at_edges = at_edges + np.maximum(edges_s - times_s[-1], 0.0) * value[-1]
    widths = np.diff(edges_s)
    return np.asarray(np.divide(np.diff(at_edges), widths, out=np.zeros_like(widths), where=widths > 0))
