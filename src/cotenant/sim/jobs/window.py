"""Selects which jobs of a trace are in the arrays of the compiled event loop (kernel.py): those that have not finished,
and those that arrive next. So the arrays stay small."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cotenant.policy.jobs.arrays import GRANT, NONE, NOT_RUNNING, Array
from cotenant.sim.jobs.state import C_ACTIVE, C_MORE, C_NEXT, World, make_run

JOBS_AT_ONCE = 1 << 18  # number of arrivals of jobs that are loaded together


class Window:
    """The event loop's arrays, and for each job in them its number in the trace: job k of the arrays is job `rows[k]`
    of the trace, and `rows` rises. `load(first, last)` returns two arrays, of JOB and of PROGRESS, with one element for
    each of the trace's jobs from `first` to `last` - 1. Decisions do not depend on how many jobs are loaded, because
    jobs keep their order and are loaded before they can arrive."""

    def __init__(
        self,
        world: World,
        jobs: int,
        load: Callable[[int, int], tuple[Array, Array]] | None = None,
        at_once: int = JOBS_AT_ONCE,
    ) -> None:
        self.world = world
        self.jobs = jobs  # number of jobs of the whole trace
        self._load, self._at_once = load, at_once
        self._loaded = len(world.jobs)
        self.rows: NDArray[np.int64] = np.arange(self._loaded)
        world.run.counters[C_MORE] = self._loaded < jobs

    @property
    def finished(self) -> int:
        """Return the number of jobs of the trace that have finished."""
        c = self.world.run.counters
        return int(self._loaded - len(self.rows) + c[C_NEXT] - c[C_ACTIVE])

    def unfinished(self) -> NDArray[np.int64]:
        """Return the trace rows of the loaded jobs that have not finished."""
        return np.asarray(self.rows[np.isnan(self.world.run.job["finish_s"])])

    def needs_jobs(self) -> bool:
        """Whether the event loop cannot continue without the next arrivals."""
        c = self.world.run.counters
        return bool(c[C_MORE]) and int(c[C_NEXT]) == len(self.rows)

    def advance(self) -> None:
        """Remove finished jobs and load the next ones to arrive. All events must have been taken from the buffers."""
        assert self._load is not None
        world, run = self.world, self.world.run
        last = min(self._loaded + self._at_once, self.jobs)
        fresh_jobs, fresh_progress = self._load(self._loaded, last)
        active = int(run.counters[C_ACTIVE])
        kept = np.sort(run.order[:active])
        # new index of each job in the arrays; the last element is for NONE, which stays NONE
        place = np.full(len(self.rows) + 1, NONE)
        place[kept] = np.arange(active)
        jobs = np.concatenate([world.jobs[kept], fresh_jobs])
        moved = make_run(len(jobs), len(run.old_entry))
        moved.job[:active], moved.job[active:] = run.job[kept], fresh_progress
        for name in ("order", "previous_order", "ended"):
            old, new = getattr(run, name), getattr(moved, name)
            new[:active] = place[old[:active]]
        for name in ("old_entry", "counters", "wanted_gpus"):
            getattr(moved, name)[:] = getattr(run, name)
        grants = np.zeros(len(jobs), GRANT)
        grants["level"] = NOT_RUNNING
        grants[:active] = world.alloc.job[kept]
        # entries of allocations still have the old job numbers, which are used only within one decision of the policy
        self.world = world._replace(
            jobs=jobs,
            run=moved,
            alloc=world.alloc._replace(job=grants),
            scratch=world.scratch._replace(selected=np.zeros(len(jobs), np.int64), host=np.full(len(jobs), NONE)),
        )
        self.rows = np.concatenate([self.rows[kept], np.arange(self._loaded, last)])
        self._loaded = last
        moved.counters[C_NEXT] = active
        moved.counters[C_MORE] = last < self.jobs
