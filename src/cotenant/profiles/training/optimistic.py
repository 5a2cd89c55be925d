"""Optimistic profiling: a training job's sensitivity to cores and memory from a few real runs.

Only cores are measured, with all data in memory. The effect of less memory is computed: the part of the data set that
does not fit is read from storage each epoch, and an epoch takes the longer of reading and computing (Synergy, OSDI'22,
section 4.1; it assumes a cache without replacement, whose hit rate is the fraction that fits).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CLOSE = 0.10  # throughputs count as equal if their relative difference is smaller
# a point counts as being on the line between its neighbours if its relative distance to the line is smaller
STRAIGHT = 0.03
CACHED = tuple(i / 10 for i in range(11))  # fractions of the data set in the page cache for which the table has rows


@dataclass(frozen=True)
class CpuPoint:
    """One real run of a training job: seconds per step with this many cores (all GPUs together)."""

    cpus: int
    step_s: float


def sweep(measure: Callable[[int], float], least: int, most: int, stride: int, runs: int) -> list[CpuPoint]:
    """Measure the points that determine the curve of speed by number of cores; return them in ascending order of cores,
    at most `runs` of them.

    The ends of the range are measured first; then, as long as runs are left, the middle of the interval over which the
    speed changes most, unless the change is below CLOSE or known to be linear. `measure(cpus)`: seconds per step.
    `stride`: each number of cores between the ends is `least` plus a multiple of `stride` (one core per GPU).
    """
    found = {most: measure(most)}
    if least < most:
        found[least] = measure(least)
    straight: set[tuple[int, int]] = set()
    while len(found) < runs:
        points = sorted(found)
        gaps = []
        for low, high in itertools.pairwise(points):
            middle = low + (high - low) // 2 // stride * stride
            change = abs(found[low] - found[high]) / max(found[low], found[high])
            if low < middle < high and change > CLOSE and (low, high) not in straight:
                gaps.append((change, low, middle, high))
        if not gaps:
            break
        _, low, middle, high = max(gaps)
        found[middle] = measure(middle)
        share = (middle - low) / (high - low)
        line = (1 - share) / found[low] + share / found[high]
        if abs(1 / found[middle] - line) <= STRAIGHT * line:
            straight |= {(low, middle), (middle, high)}
    return [CpuPoint(cpus, found[cpus]) for cpus in sorted(found)]


@dataclass(frozen=True)
class DataSet:
    """A training job's data set, from which the effect of memory is computed: its size in bytes, the number of steps in
    which the job reads all of it once (an epoch), and the read speeds from storage and from memory in 10^6 bytes per
    second. `resident_bytes`: the job's own memory beside the data.
    """

    bytes: int
    steps_per_epoch: int
    storage_mbps: float
    memory_mbps: float
    resident_bytes: int


def step_seconds(points: list[CpuPoint], data: DataSet | None) -> tuple[Floats, Floats]:
    """Return the amounts of memory of the table in bytes, and the seconds per step as an array (points, memory).

    A step takes max(measured, fetch) seconds. `fetch` is the time to read a step's part of the data set: (cached bytes
    / memory speed + other bytes / storage speed) / steps per epoch. Without a data set, memory has no effect, and the
    array has one column.
    """
    measured = np.array([p.step_s for p in points])
    if data is None or data.bytes <= 0:
        resident = 1 if data is None else max(1, data.resident_bytes)
        return np.array([float(resident)]), measured[:, None]
    cached = np.array(CACHED) * data.bytes
    fetch_s = (cached / data.memory_mbps + (data.bytes - cached) / data.storage_mbps) / 1e6 / data.steps_per_epoch
    return max(1, data.resident_bytes) + cached, np.maximum(measured[:, None], fetch_s[None, :])


def storage_need_mbps(points: list[CpuPoint], data: DataSet) -> Floats:
    """Return the rate in 10^6 bytes per second that storage must deliver so that fetching never takes longer than
    computing, as an array (points, memory); the full speed of storage if even that is too slow.
    """
    cached = np.array(CACHED) * data.bytes
    epoch_s = np.array([p.step_s for p in points])[:, None] * data.steps_per_epoch
    left_s = epoch_s - cached[None, :] / data.memory_mbps / 1e6
    uncached = (data.bytes - cached)[None, :] / 1e6
    with np.errstate(divide="ignore", invalid="ignore"):
        need = np.where(uncached <= 0, 0.0, np.where(left_s > 0, uncached / left_s, math.inf))
    return np.minimum(need, data.storage_mbps)


def profile_table(
    name: str,
    points: list[CpuPoint],
    gpus: float,
    data: DataSet | None,
    *,
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of a profile file with one model, as `tables.load_profiles` reads it.

    Cores and memory are per GPU; the base point (throughput 1) is 3 cores per GPU, or the nearest measured, with the
    most memory. `more` is added to the model's entry.
    """
    memory_bytes, step_s = step_seconds(points, data)
    cpus = np.array([p.cpus / gpus for p in points])
    base = int(np.argmin(np.abs(cpus - 3.0)))
    base_s = float(step_s[base, -1])
    entry: dict[str, Any] = {
        "class": "measured",
        "iteration_s": base_s,
        "throughput": np.round(base_s / step_s, 6).tolist(),
    }
    if data is not None and data.bytes > 0:
        entry["storage_mbps"] = np.round(storage_need_mbps(points, data), 3).tolist()
    return {
        "name": name,
        "cpus_per_gpu": cpus.tolist(),
        "memory_gb_per_gpu": (memory_bytes / 1e9 / gpus).tolist(),
        "models": {name: entry | (more or {})},
    }
