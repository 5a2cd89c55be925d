"""Hypothesis strategies for small clusters, traces and options of the training engine, and functions that read a record
by job."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cotenant.core.cluster import Cluster, NodeGroup
from cotenant.core.events import Kind
from cotenant.core.gpus import CATALOG
from cotenant.core.record.record import Record
from cotenant.core.work import Jobs, Trace
from cotenant.policy.jobs import allotment, ordering, placement
from cotenant.profiles.training.tables import ModelProfile, Profiles, TwoSpeed, load_profiles
from cotenant.sim.jobs.engine import EngineOptions

ORDERINGS, ALLOTMENTS, PLACEMENTS = tuple(ordering.ORDERINGS), tuple(allotment.ALLOTMENTS), tuple(placement.PLACEMENTS)


def profiles() -> Profiles:
    """The built-in models, and two with features that those lack: a slowdown across nodes, and measured speeds by
    GPU."""
    shipped = load_profiles()
    odd = ModelProfile(
        name="odd",
        family="image",
        iteration_s=0.37,
        cpus_per_gpu=np.array([2.0, 5.0, 7.0]),
        memory_gb_per_gpu=np.array([10.0, 70.0]),
        throughput=np.array([[0.4, 0.8], [0.9, 1.4], [1.0, 2.3]]),
        ideal_cpus_per_gpu=7.0,
        ideal_memory_gb_per_gpu=70.0,
        multi_node_factor=0.6,
        two_speed={3.0: TwoSpeed(0.41, 2.2, 7.0)},
        gpu_speed={"A100-40GB": 1.0, "T4": 0.2},
    )
    local = dataclasses.replace(shipped.models["res18"], name="local", multi_node_factor=0.8)
    return Profiles("cases", "cases", {**shipped.models, "odd": odd, "local": local})


PROFILES = profiles()
MODELS = ("alexnet", "res18", "gnmt", "m5", "odd", "local", "deepspeech")


def groups() -> st.SearchStrategy[NodeGroup]:
    return st.builds(
        lambda count, gpus, gpu, ratio, gb: NodeGroup(count, gpus, CATALOG[gpu], ratio * gpus, gb * gpus * 10**9),
        st.integers(1, 4),
        st.sampled_from([1, 2, 3, 4, 8]),
        st.sampled_from(["A100-40GB", "T4", "V100-16GB"]),
        st.sampled_from([1.5, 3.0, 3.0, 4.0, 6.0, 10 / 3]),
        st.sampled_from([30, 62.5, 62.5, 100, 200]).map(lambda gb: int(gb * 2) // 2 if gb != 62.5 else 62),
    )


def clusters() -> st.SearchStrategy[Cluster]:
    """Clusters with one group of nodes, so that jobs have to wait, and sometimes with three different groups."""
    plain = st.builds(
        lambda count, gpus: Cluster((NodeGroup(count, gpus, CATALOG["A100-40GB"], 3 * gpus, 62_500_000_000 * gpus),)),
        st.integers(1, 4),
        st.sampled_from([1, 2, 4, 8]),
    )
    return st.one_of(plain, st.lists(groups(), min_size=1, max_size=3).map(lambda g: Cluster(tuple(g))))


@st.composite
def traces(draw: Any, cluster: Cluster, max_jobs: int = 24) -> Trace:
    """Traces of jobs that do not need more GPUs than the cluster has."""
    names = sorted({g.gpu.name for g in cluster.groups})
    gpus_of = {n: sum(g.count * g.gpus for g in cluster.groups if g.gpu.name == n) for n in names}
    accepts = st.sampled_from(["", "", "", *names, "|".join(names)])
    sizes = st.sampled_from([1, 1, 1, 2, 3, 4, 6, 8, 12, 0.25, 0.5, 0.3])
    job = st.tuples(
        accepts,
        sizes,
        st.sampled_from(MODELS),
        st.integers(1, 9_000_000),  # duration in ms
        st.sampled_from([0, 0, 0, 1, 150, 700, 5000]) | st.integers(0, 3000),  # gap before the job arrives, in s
        st.sampled_from([0, 0, 0, 0, 1, -1]),
        st.sampled_from([math.nan, math.nan, math.nan, 1, 2.5, 10, 40]),
        st.sampled_from([math.nan, math.nan, math.nan, 5, 100, 400]),
        st.booleans(),  # whether the trace states a duration or a number of iterations
    )
    rows = []
    for accept, size, *rest in draw(st.lists(job, min_size=1, max_size=max_jobs)):
        most = sum(gpus_of[n] for n in (accept.split("|") if accept else names))
        rows.append((accept, min(size, most), *rest))
    accept, size, model, ms, gap, priority, cpus, gb, timed = zip(*rows, strict=True)
    seconds = np.array(ms) / 1000
    timed_rows = np.array(timed)
    jobs = Jobs.build(
        len(rows),
        id=[f"j{i}" for i in range(len(rows))],
        arrival_s=np.cumsum(np.array(gap, float)),
        gpus=size,
        duration_s=np.where(timed_rows, seconds, np.nan),
        iterations=np.where(timed_rows, np.nan, np.ceil(seconds * 2)),
        model=model,
        priority=priority,
        cpus=cpus,
        memory_bytes=np.array(gb) * 1e9,
        gpu_models=accept,
    )
    return Trace(jobs, "random")


def options() -> st.SearchStrategy[EngineOptions]:
    return st.builds(
        EngineOptions,
        lease_s=st.sampled_from([300.0, 300.0, 60.0, 1000.0]),
        finish=st.sampled_from(["exact", "lease-end"]),
        speeds=st.sampled_from(["matrix", "two-speed"]),
        # restart and checkpoint together must take less than a lease, else no job may ever end
        restart_cost_s=st.sampled_from([0.0, 0.0, 30.0, 45.0]),
        checkpoint_cost_s=st.sampled_from([0.0, 0.0, 11.5]),
        record_placements=st.booleans(),
        jobs_at_once=st.sampled_from([1, 2, 5, 1 << 18]),
    )


Change = tuple[float, int, int, tuple[tuple[int, float], ...]]
GRANTS = (Kind.START, Kind.RESUME, Kind.MOVE, Kind.RESIZE, Kind.PREEMPT, Kind.FINISH)


def changes(record: Record) -> list[list[Change]]:
    """For each job: (time, thousandths of a core, MB, sorted (node, GPUs)) at every event that changed its
    resources."""
    found: list[list[Change]] = [[] for _ in range(record.jobs.height)]
    e, places = record.events, record.placements
    for i in range(len(e)):
        if e.kind[i] in GRANTS:
            where = tuple(sorted((n, round(g, 6)) for n, g in places.at(i))) if places is not None else ()
            change = (float(e.time_s[i]), int(e.cpu_milli[i]), int(e.memory_mb[i]), where)
            # two levels may have equal amounts, and then a change between them is none
            if not found[e.job[i]] or found[e.job[i]][-1][1:] != change[1:]:
                found[e.job[i]].append(change)
    return found


def finish_times(record: Record) -> list[float]:
    """Finish time of each job. Asserts that each job finished exactly once."""
    e = record.events
    ends = e.kind == Kind.FINISH
    times = np.full(record.jobs.height, np.nan)
    times[e.job[ends]] = e.time_s[ends]
    assert ends.sum() == record.jobs.height
    return times.tolist()  # type: ignore[no-any-return]


def crowded_case(seed: int) -> tuple[Cluster, Trace]:
    """Many concurrent jobs on up to 70 nodes, which hypothesis would rarely draw. The plain-Python engine needs about a
    second for a case."""
    r = random.Random(seed)
    models = r.sample(["A100-40GB", "T4", "V100-16GB"], k=r.choice([1, 1, 2, 3]))
    cluster = Cluster(
        tuple(
            NodeGroup(1 + r.choice([1, 2, 3, 66]) // len(models), g, CATALOG[m], g * cpus, g * gb * 10**9)
            for m in models
            for g, cpus, gb in [(r.choice([1, 2, 4, 8]), r.choice([3, 4, 6]), r.choice([30, 62, 125]))]
        )
    )
    gpus_of = {m: sum(g.count * g.gpus for g in cluster.groups if g.gpu.name == m) for m in models}
    n = r.randint(20, 150)
    accepts = [r.choice(["", "", "", *models]) for _ in range(n)]
    sizes = [
        min(r.choice([1, 1, 2, 3, 4, 8, 8, 16, 0.25, 0.5, 0.7]), gpus_of[a] if a else sum(gpus_of.values()))
        for a in accepts
    ]
    stated = r.random() < 0.3
    arrivals = sorted(r.uniform(0, r.choice([1.0, 5000.0])) for _ in range(n))
    jobs = Jobs.build(
        n,
        id=[str(i) for i in range(n)],
        arrival_s=[round(a, 3) for a in arrivals],
        gpus=sizes,
        duration_s=[round(r.choice([100, 1000, 6000]) * r.random() + 0.001, 3) for _ in range(n)],
        model=[r.choice(MODELS) for _ in range(n)],
        priority=[r.choice([0, 0, 0, 0, 1]) for _ in range(n)],
        cpus=[r.choice([math.nan, 1, 8, 30]) if stated else math.nan for _ in range(n)],
        memory_bytes=[r.choice([math.nan, 20e9, 300e9]) if stated else math.nan for _ in range(n)],
        gpu_models=accepts,
    )
    return cluster, Trace(jobs, f"crowded {seed}")
