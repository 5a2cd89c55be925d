"""The shipped table of training workloads on MIG slices, measured on an A100-40GB."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

from cotenant.core.mig import Geometry, geometry, kind_of

MEASURED_ON = "A100-40GB"


@dataclass(frozen=True)
class MigWorkload:
    """One training workload of the table: seconds from start to the first batch, and seconds per iteration by kind of
    slice (NaN if the workload runs out of memory on it).
    """

    model: str
    launch_s: float
    latency_s: tuple[float, ...]


@cache
def measured_geometry() -> Geometry:
    """Return the geometry (kinds of MIG slice) in whose order the table has its latencies."""
    return geometry(MEASURED_ON, double_memory=False)


@cache
def workloads() -> dict[str, MigWorkload]:
    """Return the table: the name of each training workload's model and its measurements."""
    geo = measured_geometry()
    text = files("cotenant.profiles").joinpath("data", "mig-a100-40gb.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    result = {}
    for row in rows:
        by_kind = {kind_of(geo, c.removeprefix("lat_")): v for c, v in row.items() if c.startswith("lat_")}
        latency = tuple(float(by_kind[k]) if by_kind[k] else math.nan for k in geo.kinds)
        result[row["model"]] = MigWorkload(row["model"], float(row["launch_s"]), latency)
    return result


def speeds_of(latency_s: np.ndarray) -> np.ndarray:
    """Convert seconds per iteration (jobs, kinds) to speeds relative to the whole GPU, which is the first kind; 0 if
    the job runs out of memory."""
    known = ~np.isnan(latency_s)
    return np.where(known, latency_s[:, :1] / np.where(known, latency_s, 1.0), 0.0)
