"""The public Synergy simulator's traces and results, as laid out in the reference folder."""

from __future__ import annotations

import csv
import heapq
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from engine_cases import finish_times

from cotenant.core.cluster import Cluster, NodeGroup
from cotenant.core.gpus import CATALOG
from cotenant.core.work import Floats, Trace
from cotenant.policy.jobs.choice import JobPolicy
from cotenant.profiles.training.tables import load_profiles
from cotenant.sim.jobs.engine import EngineOptions, run_training
from cotenant.workloads.jobs.registry import read_trace

PUBLIC = EngineOptions(speeds="two-speed", finish="lease-end")
PROFILES = load_profiles()


@dataclass(frozen=True)
class Golden:
    """One row of results.csv and its column of per-job completion times, seconds, by job id."""

    trace: str
    policy: str
    mean_jct_h: float
    makespan_h: float
    jct_s: Floats

    def job_policy(self, ordering: str = "") -> JobPolicy:
        own, allotment, *placement = self.policy.split("+")
        return JobPolicy(ordering or own, allotment, placement[0] if placement else "first-fit")


@dataclass(frozen=True)
class Run:
    """Result of an engine for a trace: completion times by job id, and the makespan."""

    jct_s: Floats
    makespan_h: float


def goldens(shared: Path) -> list[Golden]:
    """Every row of results.csv."""
    folder = shared / "reference/synergy"
    found = []
    columns: dict[str, dict[str, Floats]] = {}
    for row in csv.DictReader((folder / "results.csv").open()):
        name = row["trace"]
        if name not in columns:
            lines = list(csv.DictReader((folder / f"{name}.jct_s.csv").open()))
            columns[name] = {key: np.array([float(line[key]) for line in lines]) for key in lines[0]}
        jct = columns[name][row["policy"]]
        found.append(Golden(name, row["policy"], float(row["mean_jct_h"]), float(row["makespan_h"]), jct))
    return found


def cluster_of(trace: str) -> Cluster:
    nodes = 4 if trace.startswith("stress") else 16
    return Cluster((NodeGroup(nodes, 8, CATALOG["A100-40GB"], 24, 500 * 10**9),))


def load(shared: Path, name: str) -> tuple[Trace, list[int]]:
    """Return the trace in the order of arrival in the public simulator, and the ids of the jobs in that order.

    The public simulator keeps arrivals in a binary heap, and its first scheduling event comes after those of the same
    time. So the thousand jobs of static_1000_single, all at time 0, arrive in the order in which that heap returns
    them.
    """
    trace = read_trace(f"synergy:{shared / 'reference/synergy' / name}.csv")
    order = list(range(len(trace.jobs)))
    if name == "static_1000_single":
        order = heap_order(len(order))
        trace.jobs = trace.jobs.take(np.array(order))
    return trace, order


class _Event:
    def __init__(self, kind: int, job: int) -> None:
        self.kind, self.job = kind, job

    def __lt__(self, other: _Event) -> bool:
        return self.kind < other.kind


def heap_order(n: int) -> list[int]:
    """Order in which a binary heap yields n equal arrivals with one later event pushed after them."""
    heap: list[_Event] = []
    for event in [_Event(0, i) for i in range(n)] + [_Event(1, -1)]:
        heapq.heappush(heap, event)
    return [heapq.heappop(heap).job for _ in range(n)]


def by_id(finish_s: list[float], trace: Trace, order: list[int]) -> Run:
    jct = np.empty(len(order))
    jct[order] = np.array(finish_s) - trace.jobs.arrival_s
    return Run(jct, max(finish_s) / 3600)


def run_engine(shared: Path, golden: Golden, ordering: str = "") -> Run:
    trace, order = load(shared, golden.trace)
    policy = golden.job_policy(ordering)
    record, _ = run_training(trace, cluster_of(golden.trace), PROFILES, policy, PUBLIC)
    return by_id(finish_times(record), trace, order)
