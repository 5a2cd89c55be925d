"""State machine of one GPU under MISO: its jobs with their slices, or the progress of its measurement under MPS.

Input: events (arrivals, departures, numbers of steps) with their times. Output: the share that each job should have
now.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from cotenant.core.mig import Geometry, Placement
from cotenant.profiles.mig.mps_columns import LEVELS, predictor_input
from cotenant.profiles.mig.speeds import compute_fraction

# Predicts the speed of each job on each kind of slice, relative to the whole GPU. Argument: seconds per step, an array
# of shape (3, 7), with a row for each MPS percentage of LEVELS and a column for each job; dummies fill up to 7 jobs
# (`predictor_input`). Result: speeds, an array of shape (7, number of kinds), with a row for each job.
Predict = Callable[[np.ndarray], np.ndarray]
LEAST_STEPS = 3


@dataclass(frozen=True)
class Wish:
    """The part of a GPU that a job should have now: at most `limit` of the SMs; `share` of the GPU is accounted to the
    job. `slice`: kind and start of its slice; None if the job is being measured or has the whole GPU.
    """

    share: float
    limit: float
    slice: str | None = None
    measuring: bool = False


@dataclass
class Steps:
    """A job's training steps at one MPS percentage of the measurement. `attempt`: number of the job's attempt (run of
    its processes) whose reports count. `first`, `last`: the first and the last report, each as (step, time in s).
    """

    attempt: int
    first: tuple[int, float] | None = None
    last: tuple[int, float] | None = None

    def see(self, attempt: int, step: int, at_s: float) -> None:
        """Handle a job's progress report. A report of an earlier attempt was made at the previous percentage, and is
        ignored.
        """
        if attempt < self.attempt:
            return
        if attempt > self.attempt or self.first is None:
            self.attempt, self.first = attempt, (step, at_s)
        self.last = (step, at_s)

    def latency_s(self, least_s: float) -> float | None:
        """Seconds per step; None until the job was observed for long enough."""
        if self.first is None or self.last is None:
            return None
        steps, taken_s = self.last[0] - self.first[0], self.last[1] - self.first[1]
        return taken_s / steps if taken_s >= least_s and steps >= LEAST_STEPS else None


@dataclass
class Measurement:
    """A measurement of a GPU's jobs under MPS, in progress. It goes through the active-thread percentages of LEVELS;
    `level` is the index of the present one. `seen`: job -> its steps at the present percentage; `found`: for each
    earlier percentage, job -> seconds per step.
    """

    began_s: float
    level: int = 0
    seen: dict[str, Steps] = field(default_factory=dict)
    found: list[dict[str, float]] = field(default_factory=list)


@dataclass
class MisoGpu:
    """State of one GPU. `place`: slice of each job; None: the job has the whole GPU, or no slice yet. `measure_s`:
    seconds for which each job's steps are observed at each MPS percentage. `patience_s`: seconds after which the
    measurement no longer waits for a job that reports no steps.
    """

    geo: Geometry
    measure_s: float = 10.0
    patience_s: float = 120.0
    place: dict[str, Placement | None] = field(default_factory=dict)
    measurement: Measurement | None = None

    @property
    def jobs(self) -> list[str]:
        """The jobs on the GPU, in order of arrival."""
        return list(self.place)

    def begin(self, job: str | None, attempts: Mapping[str, int], now_s: float) -> None:
        """Start to measure all jobs of the GPU, to which `job` is added. `attempts`: number of each job's latest
        attempt (run of its processes), counted from 0; -1 if the job has never run."""
        if job is not None:
            self.place[job] = None
        for name in self.place:
            self.place[name] = None
        self.measurement = Measurement(now_s)
        self._next_level(attempts)

    def _next_level(self, attempts: Mapping[str, int]) -> None:
        assert self.measurement is not None
        # every job is restarted with the new percentage, so the reports of its present attempt do not count
        self.measurement.seen = {job: Steps(attempts.get(job, -1) + 1) for job in self.place}

    def see(self, job: str, attempt: int, step: int, at_s: float) -> None:
        """Handle a progress report of one of the GPU's jobs."""
        if self.measurement is not None and job in self.measurement.seen:
            self.measurement.seen[job].see(attempt, step, at_s)

    def stays(self, job: str, attempt: int) -> None:
        """Measure a job in its present attempt, of number `attempt`. The job is not restarted, since an earlier
        measurement, which was aborted, has started it with the MPS percentage that it needs now.
        """
        if self.measurement is not None and job in self.measurement.seen:
            steps = self.measurement.seen[job]
            steps.attempt = min(steps.attempt, attempt)

    def leave(self, job: str) -> None:
        """Remove a job that has ended or moves to another GPU."""
        del self.place[job]
        if self.measurement is not None:
            self.measurement.seen.pop(job, None)
            for level in self.measurement.found:
                level.pop(job, None)
            if len(self.place) < 2:
                self.measurement = None  # only one job is left, so it has the GPU for itself and nothing is measured

    def advance(self, attempts: Mapping[str, int], now_s: float, predict: Predict) -> dict[str, np.ndarray] | None:
        """Continue the measurement; once it is complete, returns the predicted speeds of every job on each kind of
        slice. A job without steps within `patience_s` at a percentage counts as slow as the slowest other job, so that
        the other jobs need not wait for it.
        """
        m = self.measurement
        if m is None:
            return None
        latencies = {job: steps.latency_s(self.measure_s) for job, steps in m.seen.items()}
        known = [value for value in latencies.values() if value is not None]
        if len(known) < len(latencies) and (not known or now_s - m.began_s < self.patience_s):
            if not known and now_s - m.began_s >= 3 * self.patience_s:
                self.measurement = None  # no job has reported a step, so the measurement is given up
                return {}
            return None
        m.found.append({job: max(known) if value is None else value for job, value in latencies.items()})
        m.level, m.began_s = m.level + 1, now_s
        if m.level < len(LEVELS):
            self._next_level(attempts)
            return None
        self.measurement = None
        table = np.array([[level[job] for job in self.place] for level in m.found])
        speeds = predict(predictor_input(table))
        return {job: speeds[column] for column, job in enumerate(self.place)}

    def wishes(self) -> dict[str, Wish]:
        """Return the part of the GPU that each job should have now."""
        if self.measurement is not None:
            share = _part(1 / len(self.place))
            limit = LEVELS[self.measurement.level]
            return {job: Wish(share, limit, measuring=True) for job in self.place}
        parts = dict(zip(self.geo.kinds, compute_fraction(self.geo), strict=True))
        found = {}
        for job, place in self.place.items():
            if place is None or place.kind == self.geo.kinds[0]:
                found[job] = Wish(1.0, 1.0)
            else:
                part = _part(parts[place.kind])
                found[job] = Wish(part, part, str(place))
        return found


def _part(fraction: float) -> float:
    """Round down to a millionth, so that fractions that fill a GPU do not exceed it."""
    return math.floor(float(fraction) * 1e6) / 1e6
