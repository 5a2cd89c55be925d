"""Speeds on MIG slices: transfer from one GPU's slices to another's, and speeds of jobs under MPS.

Both are models, not measurements; docs/benchmarks/mig.md lists the figures that depend on them.
"""

from __future__ import annotations

import numpy as np

from cotenant.core.mig import Geometry

# under MPS, n other jobs on the GPU divide a job's speed by 1 + this value x n; the value is the co-location penalty of
# MISO's controller (SoCC 2022)
MPS_PENALTY = 0.15


def compute_fraction(geo: Geometry) -> np.ndarray:
    """Return the fraction of the whole GPU's SMs that each kind of slice has; the fraction of compute slices if SM
    counts are not published.
    """
    profiles = list(geo.profiles.values())
    sms = [p.sms for p in profiles]
    if any(s is None for s in sms):
        return np.array([p.compute / profiles[0].compute for p in profiles], np.float64)
    return np.array([float(s or 0) / float(sms[0] or 1) for s in sms])


def transfer_speeds(speeds: np.ndarray, source: Geometry, target: Geometry) -> np.ndarray:
    """Return jobs' speeds on the kinds of slice of the GPU `target`, from their speeds on those of `source`. Speeds are
    relative to the whole GPU.

    speeds: (jobs, kinds of source); 0 if the job ran out of memory. A job's speed is taken as a piecewise-linear
    function of the fraction of SMs, through the origin and its measured slices, and constant above the largest measured
    slice. A job fits a slice of the target that has at least the memory of the smallest slice of the source that it
    fitted.
    """
    x_all, x_new = compute_fraction(source), compute_fraction(target)
    memory_old = np.array([p.memory_bytes for p in source.profiles.values()])
    memory_new = np.array([p.memory_bytes for p in target.profiles.values()])
    out = np.zeros((len(speeds), len(target.kinds)))
    for j, row in enumerate(speeds):
        ok = row > 0
        if not ok.any():
            continue
        order = np.argsort(x_all[ok], kind="stable")
        xs = np.concatenate(([0.0], x_all[ok][order]))
        ys = np.concatenate(([0.0], row[ok][order]))
        need = memory_old[ok].min()
        out[j] = np.where(memory_new >= 0.98 * need, np.interp(x_new, xs, ys), 0.0)
    return out


def mps_speed(speeds: np.ndarray, geo: Geometry, sharers: int, level: float) -> np.ndarray:
    """Return the assumed speed under MPS beside `sharers - 1` others at an active-thread level (0..1).

    A job's share of the SMs is min(level, 1/sharers), and its speed at that share is interpolated between its speeds on
    MIG slices. Under MPS, unlike on MIG slices, jobs also share the memory system. The speed is therefore divided by
    1 + 0.15 x the number of co-runners. speeds: (jobs, kinds) -> (jobs,). A job that fits only larger slices still
    runs, because memory is not split.
    """
    share = min(level, 1.0 / sharers)
    x = compute_fraction(geo)
    out = np.empty(len(speeds))
    for j, row in enumerate(speeds):
        ok = row > 0
        order = np.argsort(x[ok], kind="stable")
        out[j] = np.interp(share, np.concatenate(([0.0], x[ok][order])), np.concatenate(([0.0], row[ok][order]))) / (
            1.0 + MPS_PENALTY * (sharers - 1)
        )
    return out
