"""The controller's job table: unfinished jobs in memory, every change also in the store; orders wait until changes are
durable.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from cotenant.core.events import Kind, Reason
from cotenant.fleet.jobs import JobSpec
from cotenant.fleet.state import (
    ENDED,
    OVER,
    PARKED,
    STARTING,
    STOPPING,
    UP,
    WAITING,
    Assignment,
    Attempt,
    Job,
)
from cotenant.fleet.store.database import StoreError
from cotenant.fleet.store.jobs import Event, Store


class JobTable:
    """Unfinished jobs by id, in order of arrival. Change a job, then call `touch`; `flush` makes all changes durable or
    undoes all.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.jobs: dict[str, Job] = {}
        self.orders: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self._changed: dict[str, Job] = {}
        self._attempts: dict[tuple[int, int], Attempt] = {}
        self._events: list[Event] = []
        self._next_row = 0
        self._ids: set[str] = set()
        self.over = dict.fromkeys(OVER, 0)
        self.load()

    def load(self) -> None:
        """Load all unfinished jobs from the store: at the controller's start, and after a failed commit."""
        self.jobs = {job.id: job for job in self.store.open_jobs()}
        self._next_row = self.store.next_row()
        self._ids = {str(row[0]) for row in self.store.rows("SELECT id FROM jobs")}
        for state in OVER:
            self.over[state] = int(self.store.rows("SELECT COUNT(*) FROM jobs WHERE state=?", (state,))[0][0])
        self._changed, self._attempts, self._events = {}, {}, []
        self.orders.clear()

    # -- changing --------------------------------------------------------------------------------------------------

    def add(self, specs: Iterable[tuple[JobSpec, float]]) -> list[Job]:
        """Add jobs with their arrivals, in seconds of the fleet's clock; durable when this returns. Raises StoreError
        if the disk is full.
        """
        found = []
        for spec, arrival_s in specs:
            job = Job(self._next_row, self._free_id(spec.name), spec, arrival_s, last_run_s=arrival_s)
            self._next_row += 1
            self._ids.add(job.id)
            found.append(job)
        try:
            self.store.add_jobs(found, time.time())
            self.flush()
        except StoreError:
            self.load()
            raise
        late = bool(self.jobs) and bool(found) and found[0].arrival_s < next(reversed(self.jobs.values())).arrival_s
        self.jobs |= {job.id: job for job in found}
        if late or any(a.arrival_s > b.arrival_s for a, b in pairwise(found)):
            self.jobs = {j.id: j for j in sorted(self.jobs.values(), key=lambda j: (j.arrival_s, j.row))}
        return found

    def _free_id(self, name: str) -> str:
        """The name, followed by the job's number if another job has that name."""
        wanted, number = name, self._next_row + 1
        while wanted in self._ids:
            wanted, number = f"{name}-{number}", number + 1
        return wanted

    def touch(self, job: Job) -> None:
        """Mark a job and its current attempt as changed, so that the next `flush` stores them."""
        self._changed[job.id] = job
        if job.attempt is not None:
            self._attempts[job.row, job.attempt.n] = job.attempt

    def tell(self, time_s: float, job: Job, kind: Kind, reason: int, held: Assignment | None = None) -> None:
        """Record one event of a job. `held`: the resources that the job holds from now on."""
        if held is None:
            self._events.append((time_s, job.row, int(kind), int(reason), 0, 0, 0.0, []))
        else:
            self._events.append(
                (time_s, job.row, int(kind), int(reason), round(held.cpus * 1000), held.memory_bytes // 10**6,
                 held.speed, held.gpus_by_node())
            )  # fmt: skip

    def over_with(self, job: Job, state: str, time_s: float) -> None:
        """Move the job to a state in which it has ended."""
        job.state, job.finished_s = state, time_s
        job.target = None
        self.touch(job)
        job.attempt = None
        self.jobs.pop(job.id, None)

    def flush(self) -> None:
        """Write changes and commit. On StoreError everything since the last flush is undone, including orders."""
        try:
            if self._changed:
                self.store.save_jobs(self._changed.values())
            if self._attempts:
                self.store.save_attempts((row, a) for (row, _), a in self._attempts.items())
            if self._events:
                self.store.add_events(self._events)
            self.store.commit()
        except StoreError:
            self.load()
            raise
        for job in self._changed.values():
            if job.state in OVER:
                self.over[job.state] += 1
        self._changed, self._attempts, self._events = {}, {}, []

    # -- looking ---------------------------------------------------------------------------------------------------

    def running(self) -> list[Job]:
        """Return the jobs with an attempt (one run of the job's processes) that has not ended."""
        return [job for job in self.jobs.values() if job.attempt is not None]

    def waiting(self) -> list[Job]:
        """Return the jobs that have arrived and hold no GPUs: those without an attempt (a run of their processes), and
        parked ones."""
        return [
            j for j in self.jobs.values()
            if j.arrived and (j.state == WAITING if j.attempt is None else j.attempt.phase == PARKED)
        ]  # fmt: skip


def holds_gpus(attempt: Attempt) -> bool:
    """Return whether an attempt to run a job still holds its GPUs."""
    return attempt.phase in (STARTING, UP, STOPPING) and not attempt.off


def ask_stop(
    table: JobTable, job: Job, why: str, now_s: float, grace_s: float, reason: int = int(Reason.OUTRANKED)
) -> None:
    """Request that a job's attempt stops. The order is sent to the nodes when the request is durable."""
    attempt = job.attempt
    if attempt is None or attempt.phase == ENDED:
        return
    if attempt.phase == STOPPING and why not in ("cancel", "lost"):
        return
    if attempt.phase == PARKED:
        # the processes of a parked attempt do not run, so they need no long grace time in which to save their state
        grace_s = min(grace_s, 1.0)
    attempt.phase, attempt.stop_why = STOPPING, why
    attempt.stop_s = now_s if attempt.stop_s is None else attempt.stop_s
    job.target_reason = reason
    table.touch(job)
    order = {"do": "stop", "attempt": job.attempt_id(), "why": why, "grace_s": grace_s}
    for node in attempt.nodes:
        if node not in attempt.ended:
            table.orders[node].append(order)
