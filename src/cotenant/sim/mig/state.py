"""The state of a run of a partition policy: GPUs with their instances, and jobs with their remaining work."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from cotenant.core.events import Kind, Reason
from cotenant.core.mig import Geometry, Placement


class Mode(IntEnum):
    """What a GPU is used for at present, in a run of a partition policy."""

    MIG = 0  # the GPU is divided into instances with one job each
    PROFILE = 1  # the GPU is one instance, whose jobs are measured under MPS
    SHARED = 2  #: several jobs share the GPU under MPS without partitions (policy mps)
    GANG = 3  # a job of several GPUs has this GPU for itself


@dataclass
class GpuState:
    """The state of one GPU. `instances`: the MIG instances that exist on it; `place`: the instance of each job. The GPU
    is busy while its layout changes. `draining`: a gang waits for the GPU, so jobs behind that gang may not use it.
    `revisit`: a job ended while the GPU was busy, so the GPU must be planned again afterwards.
    """

    index: int
    node: int
    instances: set[Placement]
    jobs: list[int] = field(default_factory=list)
    place: dict[int, Placement] = field(default_factory=dict)
    mode: Mode = Mode.MIG
    busy_until: float = 0.0
    version: int = 0
    draining: bool = False
    revisit: bool = False


@dataclass
class Entry:
    """An entry of the log of a run's events, before it is converted for the record."""

    time_s: float
    job: int
    kind: Kind
    reason: Reason
    speed: float
    gpus: tuple[int, ...]
    share: float


class Clock:
    """A queue of future events, ordered by time; events of equal time leave in the order in which they came."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str, int, int]] = []
        self._count = 0
        self.now = 0.0

    def at(self, time_s: float, what: str, subject: int, version: int = 0) -> None:
        self._count += 1
        heapq.heappush(self._heap, (time_s, self._count, what, subject, version))

    def next(self) -> tuple[str, int, int] | None:
        if not self._heap:
            return None
        self.now, _, what, subject, version = heapq.heappop(self._heap)
        return what, subject, version


class Work:
    """The progress of every job: remaining work in seconds of a whole GPU, its speed, and `since`, the time up to which
    its work is counted. While a job launches, `since` is the future time at which it starts to work."""

    def __init__(self, work_s: np.ndarray) -> None:
        n = len(work_s)
        self.left: list[float] = [float(w) for w in work_s]
        self.rate = [0.0] * n
        self.since = [0.0] * n
        self.version = [0] * n
        self.gpu: list[tuple[int, ...]] = [()] * n
        self.start = [float("nan")] * n
        self.finish = [float("nan")] * n
        self.restarts = [0] * n

    def settle(self, job: int, now: float) -> None:
        """Subtract the work that the job has done until now from its remaining work."""
        if now > self.since[job]:
            self.left[job] = max(0.0, self.left[job] - self.rate[job] * (now - self.since[job]))
            self.since[job] = now

    def run(self, job: int, now: float, ready: float, rate: float, clock: Clock) -> None:
        """Let a job work at `rate` from `ready` on, and schedule its end."""
        self.settle(job, now)
        self.rate[job], self.since[job] = rate, ready
        self.version[job] += 1
        if rate > 0:
            clock.at(ready + self.left[job] / rate, "finish", job, self.version[job])

    def stop(self, job: int, now: float) -> None:
        self.settle(job, now)
        self.rate[job] = 0.0
        self.version[job] += 1


def share_of(geo: Geometry, placement: Placement) -> float:
    """Return the compute slices of an instance as a fraction of the GPU."""
    return geo.profiles[placement.kind].compute / geo.compute_slices
