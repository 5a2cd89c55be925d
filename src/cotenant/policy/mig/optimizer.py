"""The optimal MIG layout of a GPU and assignment of jobs to instances: the exact optimizer and its constraints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cotenant.core.errors import InputError
from cotenant.core.mig import Geometry, Layout, Placement, kind_of
from cotenant.policy.mig.kernel import assign, charge_moves, lattice

Objective = Literal["throughput", "slowdown"]
OBJECTIVES: tuple[str, ...] = ("throughput", "slowdown")
# a small cost per memory slot, so that of equally good answers the one that leaves most of the GPU free is chosen
TIE = 1e-9


@dataclass(frozen=True)
class PartitionJob:
    """A job as the optimizer sees it.

    `speed`: kind of instance (or full profile name) -> speed of the job there, relative to the whole GPU. Where the
    speed is missing, zero or negative, the job cannot run (out of memory). If the speed on the 1g instance of double
    memory is missing, it is taken to be that on 1g. A larger instance may have a lower speed. `min_slice`: the job gets
    no instance with fewer compute slices or less memory than this. `qos_floor`: the job gets no instance on which its
    speed is below this, 0..1.
    """

    name: str
    speed: Mapping[str, float]
    min_slice: str | None = None
    qos_floor: float = 0.0
    memory_bytes: int = 0


@dataclass(frozen=True)
class PartitionPlan:
    """The best instance of each job. `objective` is the sum of the jobs' speeds, or the mean of 1/speed, without the
    cost of moves.
    """

    placements: tuple[Placement, ...]
    objective: float
    cost: float
    moved: tuple[int, ...] = field(default=())

    @property
    def layout(self) -> Layout:
        return tuple(sorted(self.placements))


def speed_row(geo: Geometry, job: PartitionJob) -> np.ndarray:
    """Return the speed of a job on every kind in `geo.kinds`, float64; 0 where it may not run."""
    known = {kind_of(geo, k): float(v) for k, v in job.speed.items() if _offered(geo, k)}
    for kind, value in known.items():
        if not np.isfinite(value):
            raise InputError(
                f"job {job.name!r} has speed {value} on {kind}; give a number or leave the slice out", field="speed"
            )
    if "1g+" in geo.profiles and "1g+" not in known and known.get("1g", 0.0) > 0:
        known["1g+"] = known["1g"]
    least = geo.profiles[kind_of(geo, job.min_slice)] if job.min_slice else None
    row = np.zeros(len(geo.kinds))
    for i, (kind, profile) in enumerate(geo.profiles.items()):
        value = known.get(kind, 0.0)
        small = least is not None and (profile.compute < least.compute or profile.memory_slots < least.memory_slots)
        if value <= 0 or small or value < job.qos_floor or profile.memory_bytes < job.memory_bytes:
            continue
        row[i] = value
    return row


def _offered(geo: Geometry, kind: str) -> bool:
    try:
        kind_of(geo, kind)
    except InputError:
        return False
    return True


def costs(speeds: np.ndarray, objective: Objective) -> np.ndarray:
    """Return the cost to minimise for each job and kind of instance: -speed or 1/speed; inf where the speed is 0."""
    fits = speeds > 0
    value = -speeds if objective == "throughput" else 1.0 / np.where(fits, speeds, 1.0)
    return np.where(fits, value, np.inf)


def best_partition(
    geo: Geometry,
    speeds: np.ndarray,
    objective: Objective = "throughput",
    current: Sequence[Placement | None] | None = None,
    downtime_s: Sequence[float] | np.ndarray | float | None = None,
    horizon_s: float = np.inf,
) -> PartitionPlan | None:
    """Return the cheapest legal assignment of jobs to instances; None if the jobs do not fit together.

    speeds: (jobs, kinds of geo), 0 where a job may not run. A job whose instance differs from `current` stops for
    `downtime_s` of the next `horizon_s`, which scales its speed by 1 - downtime/horizon; a job without a present
    instance has no such cost. The layout contains no idle instances.
    """
    lat = lattice(geo)
    cost = costs(speeds, objective)[:, lat.kind] + TIE * lat.slots
    if current is not None and downtime_s is not None and np.isfinite(horizon_s):
        sits = np.array([-1 if p is None else lat.number[p] for p in current], np.int32)
        stop = np.empty(len(speeds))
        stop[:] = downtime_s
        charge_moves(cost, sits, stop / max(horizon_s, 1e-9), objective == "throughput")
    out = np.empty(len(speeds), np.int32)
    total = assign(cost, lat.level, lat.parent, lat.place, out)
    if total == np.inf:
        return None
    chosen = [float(speeds[j, lat.kind[i]]) for j, i in enumerate(out)]
    value = sum(chosen) if objective == "throughput" else sum(1.0 / v for v in chosen) / max(len(chosen), 1)
    placements = tuple(lat.placements[i] for i in out)
    moved = (
        ()
        if current is None
        else tuple(j for j, (a, b) in enumerate(zip(current, placements, strict=True)) if a is not None and a != b)
    )
    return PartitionPlan(placements, value, float(total), moved)


def plan_jobs(geo: Geometry, jobs: Sequence[PartitionJob], objective: Objective) -> PartitionPlan:
    """Call `best_partition` for named jobs. InputError if a job fits on no instance, or the jobs do not fit together.
    """
    if not jobs:
        raise InputError("there are no jobs to plan for", field="jobs")
    if len({job.name for job in jobs}) != len(jobs):
        twice = sorted({j.name for j in jobs if sum(k.name == j.name for k in jobs) > 1})
        raise InputError(f"two jobs are named {twice[0]!r}; names must differ", field="name")
    rows = []
    for job in jobs:
        row = speed_row(geo, job)
        if not row.any():
            raise InputError(
                f"job {job.name!r} fits no slice of {geo.gpu} (min_slice {job.min_slice or 'none'}, "
                f"qos_floor {job.qos_floor:g}, memory {job.memory_bytes} bytes)",
                field="jobs",
            )
        rows.append(row)
    plan = best_partition(geo, np.array(rows), objective)
    if plan is None:
        raise InputError(
            f"no layout of {geo.gpu} holds these {len(jobs)} jobs together with their limits", field="jobs"
        )
    return plan
