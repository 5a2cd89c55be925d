"""One GPU under MISO as a state machine: who is on it with which slice, or how far its measurement under MPS is. Pure.

Events go in (jobs that come and go, how many steps they have done), wishes come out: what each job should have now.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from cotenant.core.mig import Geometry, Placement
from cotenant.profiles.mig.mps_columns import LEVELS, predictor_input
from cotenant.profiles.mig.speeds import compute_fraction

Predict = Callable[[np.ndarray], np.ndarray]  # (3, 7) latencies -> (7, kinds) speeds against the whole GPU
LEAST_STEPS = 3


@dataclass(frozen=True)
class Wish:
    """What a job should have: at most `limit` of the SMs, `share` of the GPU being accounted to it. `slice`: the kind
    of its slice and where it begins, None while it is measured or alone on the GPU."""

    share: float
    limit: float
    slice: str | None = None
    measuring: bool = False


@dataclass
class Steps:
    """Steps of a job at one level, from the first report that counts: (attempt, steps, moment in seconds)."""

    attempt: int
    first: tuple[int, float] | None = None
    last: tuple[int, float] | None = None

    def see(self, attempt: int, step: int, at_s: float) -> None:
        """A report. Those of an earlier attempt are of the level before."""
        if attempt < self.attempt:
            return
        if attempt > self.attempt or self.first is None:
            self.attempt, self.first = attempt, (step, at_s)
        self.last = (step, at_s)

    def latency_s(self, least_s: float) -> float | None:
        """Seconds per step, once enough was seen."""
        if self.first is None or self.last is None:
            return None
        steps, taken_s = self.last[0] - self.first[0], self.last[1] - self.first[1]
        return taken_s / steps if taken_s >= least_s and steps >= LEAST_STEPS else None


@dataclass
class Measurement:
    """A measurement under way. `seen`: per job, at the level `level`; `found`: latencies of the levels before."""

    began_s: float
    level: int = 0
    seen: dict[str, Steps] = field(default_factory=dict)
    found: list[dict[str, float]] = field(default_factory=list)


@dataclass
class MisoGpu:
    """State of one GPU. `place`: slice of each job, None: the whole GPU or not placed yet; `attempts`: the start that
    each job was at when it was last told to change."""

    geo: Geometry
    measure_s: float = 10.0
    patience_s: float = 120.0
    place: dict[str, Placement | None] = field(default_factory=dict)
    measurement: Measurement | None = None

    @property
    def jobs(self) -> list[str]:
        """Jobs on it, in the order they came."""
        return list(self.place)

    def begin(self, job: str | None, attempts: Mapping[str, int], now_s: float) -> None:
        """Measure everybody, and a newcomer with them. `attempts`: the running start of each job, -1 for none."""
        if job is not None:
            self.place[job] = None
        for name in self.place:
            self.place[name] = None
        self.measurement = Measurement(now_s)
        self._next_level(attempts)

    def _next_level(self, attempts: Mapping[str, int]) -> None:
        assert self.measurement is not None
        # every job is started anew with another percentage: what counts is the start after the present one
        self.measurement.seen = {job: Steps(attempts.get(job, -1) + 1) for job in self.place}

    def see(self, job: str, attempt: int, step: int, at_s: float) -> None:
        """A report of progress."""
        if self.measurement is not None and job in self.measurement.seen:
            self.measurement.seen[job].see(attempt, step, at_s)

    def stays(self, job: str, attempt: int) -> None:
        """It has already what it should have at this level, from a measurement that was broken off: it is not started
        anew, and its present start counts."""
        if self.measurement is not None and job in self.measurement.seen:
            steps = self.measurement.seen[job]
            steps.attempt = min(steps.attempt, attempt)

    def leave(self, job: str) -> None:
        """It has ended, or goes elsewhere."""
        del self.place[job]
        if self.measurement is not None:
            self.measurement.seen.pop(job, None)
            for level in self.measurement.found:
                level.pop(job, None)
            if len(self.place) < 2:
                self.measurement = None  # whoever is left has the GPU to itself

    def advance(self, attempts: Mapping[str, int], now_s: float, predict: Predict) -> dict[str, np.ndarray] | None:
        """Go on with the measurement; once it is complete, the speeds by kind of every job that were predicted from it.

        A job that shows no steps within `patience_s` of a level is taken to be as slow as the slowest other: it must
        not hold up the rest.
        """
        m = self.measurement
        if m is None:
            return None
        latencies = {job: steps.latency_s(self.measure_s) for job, steps in m.seen.items()}
        known = [value for value in latencies.values() if value is not None]
        if len(known) < len(latencies) and (not known or now_s - m.began_s < self.patience_s):
            if not known and now_s - m.began_s >= 3 * self.patience_s:
                self.measurement = None  # nobody makes steps that can be seen
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
        """What everybody should have now."""
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
                found[job] = Wish(part, part, f"{place.kind}@{place.start}")
        return found


def _part(fraction: float) -> float:
    """To a millionth, never up: parts that fill a GPU must not be more than it."""
    return math.floor(float(fraction) * 1e6) / 1e6
