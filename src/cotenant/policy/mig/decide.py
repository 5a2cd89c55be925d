"""The decisions of partition policies: which GPU a job goes to, and whether the MIG layout of a GPU should change. Pure
functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from cotenant.core.errors import InputError, unknown_name
from cotenant.core.mig import Geometry, Layout, Placement
from cotenant.policy.mig.kernel import harm_of_joining, lattice
from cotenant.policy.mig.optimizer import OBJECTIVES, Objective, PartitionPlan, best_partition, costs

POLICIES: dict[str, str] = {
    "whole": "one job per GPU",
    "static": "one job per instance of a fixed MIG layout (--layout)",
    "mps": "up to 3 jobs per GPU under MPS, each limited to its share of the SMs",
    "miso": "MIG layouts chosen from speeds predicted by a measurement under MPS",
    "miso-perfect": "like miso, with exact predictions",
    "oracle": "MIG layouts chosen from the true speeds, without measurement",
}
PLACEMENTS = ("least-loaded", "best-fit")


@dataclass(frozen=True)
class PartitionRules:
    """Parameters of a partition policy. The default durations are those of MISO's public controller (SoCC 2022) on
    A100s.

    - `reconfigure_s`: time to change the MIG instances of a GPU, or to switch it to MPS
    - `profile_s`: duration of a measurement under MPS
    - `checkpoint_s`: time to save a job before it moves. The time to launch a job is a property of the job.
    - `horizon_s`: how long a layout is expected to last; a move must pay off within this time
    - `profile_after_s`: when a GPU gets another job, its jobs are measured if one of them has not been measured yet and
      has run for this time or has a minimum speed. So most short jobs cause no measurement. 0: every job that arrives
      at a shared GPU is measured.
    - `profile_sole`: also measure a job that is alone
    - `disturb`: `moved` restarts only jobs whose instance changes; `all` restarts every job on the GPU, as MISO's
      controller does
    - `mps_jobs`: jobs per GPU under policy mps
    - `overheads`: if False, reconfiguring, measuring, saving and launching take no time
    """

    policy: str
    objective: Objective = "slowdown"
    placement: str = "best-fit"
    layout: Layout | None = None
    reconfigure_s: float = 4.0
    profile_s: float = 30.0
    checkpoint_s: float = 0.0
    horizon_s: float = 300.0
    profile_after_s: float = 120.0
    disturb: str = "moved"
    profile_sole: bool = False
    mps_jobs: int = 3
    overheads: bool = True

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise unknown_name("policy", self.policy, POLICIES, "policy")
        if self.placement not in PLACEMENTS:
            raise unknown_name("placement", self.placement, PLACEMENTS, "placement")
        if self.objective not in OBJECTIVES:
            raise unknown_name("objective", self.objective, OBJECTIVES, "objective")
        if self.disturb not in ("moved", "all"):
            raise unknown_name("disturb", self.disturb, ("moved", "all"), "disturb")
        if self.policy == "static" and self.layout is None:
            raise InputError("policy static needs --layout, for example 3,2,2, or --layout best", field="layout")
        for name in ("reconfigure_s", "profile_s", "checkpoint_s", "horizon_s", "profile_after_s"):
            if not getattr(self, name) >= 0:
                raise InputError(f"must be a number of at least 0, not {getattr(self, name)}", field=name)
        if self.horizon_s == 0:
            raise InputError("must be above 0, since no move could pay off within 0 s", field="horizon")

    @property
    def profiles(self) -> bool:
        """Whether speeds are measured under MPS before a job gets its MIG instance."""
        return self.policy in ("miso", "miso-perfect")

    @property
    def repartitions(self) -> bool:
        return self.policy in ("miso", "miso-perfect", "oracle")


@dataclass(frozen=True)
class Tenancy:
    """The state of a GPU for a decision: the rows of its jobs in the table of speeds, and their instances (None: the
    job has none now).
    """

    jobs: tuple[int, ...]
    placements: tuple[Placement | None, ...]


def replan(
    geo: Geometry, rules: PartitionRules, speeds: np.ndarray, gpu: Tenancy, downtime_s: np.ndarray
) -> PartitionPlan | None:
    """Choose the best layout for a GPU's jobs, given their present instances; a change of instances must make up for
    its downtime within the horizon. Returns None if the jobs do not fit together.

    speeds: estimated speeds, of shape (all jobs, kinds of instance); downtime_s: for each of all jobs, how long it
    stops if its instance changes.
    """
    rows = list(gpu.jobs)
    if rules.disturb == "all" and rules.overheads:
        return _all_or_nothing(geo, rules, speeds[rows], gpu, downtime_s[rows])
    return best_partition(
        geo,
        speeds[rows],
        rules.objective,
        gpu.placements,
        downtime_s[rows] if rules.overheads else None,
        rules.horizon_s,
    )


def _all_or_nothing(
    geo: Geometry, rules: PartitionRules, speeds: np.ndarray, gpu: Tenancy, downtime_s: np.ndarray
) -> PartitionPlan | None:
    """Choose the layout under `disturb=all`, where any change restarts all jobs of the GPU. If all jobs have instances
    now, the layout that would be best if a change took no time is chosen only if it beats the present layout although
    the jobs are restarted.
    """
    free = best_partition(geo, speeds, rules.objective, gpu.placements)
    if free is None or any(p is None for p in gpu.placements):
        return free
    now = np.array([speeds[j, geo.kinds.index(p.kind)] for j, p in enumerate(gpu.placements) if p is not None])
    new = np.array([speeds[j, geo.kinds.index(p.kind)] for j, p in enumerate(free.placements)])
    new = new * (1 - np.minimum(downtime_s / max(rules.horizon_s, 1e-9), 0.999))
    if costs(new, rules.objective).sum() < costs(now, rules.objective).sum() - 1e-9:
        return free
    placements = tuple(p for p in gpu.placements if p is not None)
    return PartitionPlan(placements, free.objective, free.cost, ())


def cost_table(geo: Geometry, rules: PartitionRules, speeds: np.ndarray) -> np.ndarray:
    """Return the cost of each job on each instance, (jobs, placements). The caller updates it when speeds change."""
    return np.ascontiguousarray(costs(speeds, rules.objective)[:, lattice(geo).kind])


def fit_mask(speeds: np.ndarray) -> list[int]:
    """Return for each job the kinds of instance on which it may run, as a bit mask; `speeds` has the shape (jobs,
    kinds).
    """
    return [int(m) for m in ((speeds > 0) * (1 << np.arange(speeds.shape[1]))).sum(axis=1)]


def warm_up(geo: Geometry) -> None:
    """Compile the functions that decisions call, or load them from the cache, so that timed runs do not include this
    time.
    """
    lat = lattice(geo)
    one, none = np.ones((1, len(lat.placements))), np.zeros(1, np.int32)
    best_partition(geo, np.ones((1, len(geo.kinds))), "slowdown", geo.whole, 1.0, 10.0)
    harm_of_joining(one, np.zeros((1, geo.compute_slices), np.int32), none, 0, lat.level, lat.parent, lat.place)


@cache
def fit_together(geo: Geometry, masks: tuple[int, ...]) -> bool:
    """Whether jobs can each have an instance at the same time. `masks`: for each job the kinds of instance that it may
    have (see `fit_mask`), sorted, so that the cache has one entry for equal sets of jobs.
    """
    table = np.array([[float(m >> k & 1) for k in range(len(geo.kinds))] for m in masks])
    return best_partition(geo, table) is not None


def admits(geo: Geometry, masks: Sequence[int], gpu: Sequence[int], job: int) -> bool:
    """Whether a GPU can hold its jobs and one more, each on an instance on which it may run."""
    if len(gpu) >= geo.compute_slices:
        return False
    return fit_together(geo, tuple(sorted(masks[j] for j in (*gpu, job))))


def choose_gpu(
    geo: Geometry,
    rules: PartitionRules,
    cost: np.ndarray,
    masks: Sequence[int],
    gpus: Sequence[tuple[int, Sequence[int]]],
    job: int,
) -> int | None:
    """Choose the GPU for a job among `(gpu, its jobs)`; None if no GPU can take it.

    cost: (all jobs, placements), see `cost_table`; `masks`: `fit_mask` of all jobs.

    least-loaded: the GPU with fewest jobs, then the lowest index. best-fit: the GPU whose objective gets worse by
    least.
    """
    if not gpus:
        return None
    if rules.placement == "least-loaded":
        fitting = [(len(jobs), index) for index, jobs in gpus if admits(geo, masks, jobs, job)]
        return min(fitting)[1] if fitting else None
    lat, width = lattice(geo), geo.compute_slices
    counts = np.array([len(jobs) for _, jobs in gpus], np.int32)
    tenants = np.array([(*jobs, *(0,) * (width - len(jobs))) for _, jobs in gpus], np.int32)
    harm = harm_of_joining(cost, tenants, counts, job, lat.level, lat.parent, lat.place)
    best = int(np.argmin(np.round(harm, 9)))
    return gpus[best][0] if np.isfinite(harm[best]) else None
