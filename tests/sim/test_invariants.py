"""What must hold of any run, read from its record alone: nothing here knows how the engine works."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from engine_cases import (
    ALLOTMENTS,
    ORDERINGS,
    PLACEMENTS,
    PROFILES,
    clusters,
    crowded_case,
    finish_times,
    options,
    traces,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cotenant.core.cluster import Cluster, NodeGroup
from cotenant.core.errors import WorkError
from cotenant.core.events import Kind
from cotenant.core.gpus import CATALOG
from cotenant.core.record.record import Record
from cotenant.core.work import Jobs, Trace
from cotenant.policy.jobs.choice import JobPolicy
from cotenant.sim.jobs.engine import EngineOptions, run_training

FUZZ = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
RUNNING = (Kind.START, Kind.RESUME, Kind.MOVE, Kind.RESIZE)
STOPPED = (Kind.PREEMPT, Kind.FINISH)


@st.composite
def runs(draw: st.DrawFn, allotments: tuple[str, ...] = ALLOTMENTS) -> tuple[Record, Cluster, Trace, EngineOptions]:
    cluster = draw(clusters())
    trace = draw(traces(cluster))
    policy = JobPolicy(
        draw(st.sampled_from(ORDERINGS)),
        draw(st.sampled_from(allotments)),
        draw(st.sampled_from(PLACEMENTS)),
        sticky=draw(st.booleans()),
        reserve_after_s=draw(st.sampled_from([math.inf, 1000.0])),
    )
    chosen = dataclasses.replace(draw(options()), record_placements=True)
    return *run(trace, cluster, policy, chosen), cluster, trace, chosen


def run(trace: Trace, cluster: Cluster, policy: JobPolicy, chosen: EngineOptions) -> tuple[Record]:
    """The record; jobs that can never run here are left out first (one needs the CPU of one node, the memory of
    another)."""
    try:
        return (run_training(trace, cluster, PROFILES, policy, chosen)[0],)
    except WorkError:
        plain = trace.jobs.take(np.arange(len(trace.jobs)))
        plain.cpus[:], plain.memory_bytes[:] = np.nan, np.nan
        tune = dataclasses.replace(policy, allotment="tune")
        return (run_training(Trace(plain, trace.source), cluster, PROFILES, tune, chosen)[0],)


@dataclasses.dataclass
class Moment:
    """Who holds what from `time_s` on; a job's row in `holds` is (event, nodes)."""

    time_s: float
    holds: dict[int, tuple[int, list[tuple[int, float]]]]


def moments(record: Record) -> list[Moment]:
    """The state after all events of each moment; what ends at a moment is free at that moment."""
    e, places = record.events, record.placements
    assert places is not None
    holds: dict[int, tuple[int, list[tuple[int, float]]]] = {}
    found: list[Moment] = []
    for i in range(len(e)):
        job, kind = int(e.job[i]), e.kind[i]
        if found and e.time_s[i] < found[-1].time_s:
            raise AssertionError("events are out of order")
        if kind in RUNNING:
            holds[job] = (i, places.at(i))
        elif kind in STOPPED:
            assert job in holds
            del holds[job]
        if i + 1 == len(e) or e.time_s[i + 1] > e.time_s[i]:
            found.append(Moment(float(e.time_s[i]), dict(holds)))
    assert not holds
    return found


def node_list(cluster: Cluster) -> list[NodeGroup]:
    return [g for g in cluster.groups if g.gpus for _ in range(g.count)]


def fits_in_whole_gpus(parts: list[float], gpus: int) -> bool:
    """Whether parts of GPUs can lie on so many GPUs, none split over two: by trying, largest first."""
    rooms = [1.0] * gpus

    def lay(rest: list[float]) -> bool:
        if not rest:
            return True
        for i in range(gpus):
            if rooms[i] >= rest[0] - 1e-6 and rooms.index(rooms[i]) == i:
                rooms[i] -= rest[0]
                if lay(rest[1:]):
                    return True
                rooms[i] += rest[0]
        return False

    return lay(sorted(parts, reverse=True))


@FUZZ
@given(runs())
def test_nothing_is_held_twice(made: tuple[Record, Cluster, Trace, EngineOptions]) -> None:
    record, cluster, _, _ = made
    nodes = node_list(cluster)
    e, wanted = record.events, record.job("gpus")
    for moment in moments(record):
        gpus_on: list[list[float]] = [[] for _ in nodes]
        for job, (event, where) in moment.holds.items():
            assert sum(g for _, g in where) == pytest.approx(wanted[job], abs=1e-6)  # the job holds all of its GPUs
            assert len({n for n, _ in where}) == len(where)
            for node, gpus in where:
                gpus_on[node].append(gpus)
            if len(where) == 1:  # the record does not say how a gang's CPU and memory are divided among nodes
                assert e.cpu_milli[event] <= nodes[where[0][0]].cpus * 1000 + 1
                assert e.memory_mb[event] * 10**6 <= nodes[where[0][0]].memory_bytes
        for held, node in zip(gpus_on, nodes, strict=True):
            whole = round(sum(g for g in held if g >= 1))
            assert whole <= node.gpus
            assert fits_in_whole_gpus([g for g in held if g < 1], node.gpus - whole)
        cpu = sum(int(e.cpu_milli[event]) for event, _ in moment.holds.values())
        memory = sum(int(e.memory_mb[event]) for event, _ in moment.holds.values())
        assert cpu <= sum(n.cpus * 1000 for n in nodes)
        assert memory * 10**6 <= sum(n.memory_bytes for n in nodes)


def test_no_node_gives_more_cpu_or_memory_than_it_has() -> None:
    """Node by node: with equal nodes a gang's CPU and memory lie on its nodes in proportion to its GPUs there."""
    for seed in range(12):
        cluster, trace = crowded_case(seed)
        group = cluster.groups[0]
        cluster = Cluster((dataclasses.replace(group, count=max(group.count, 16 // group.gpus + 1)),))
        trace.jobs.gpu_models[:] = ""
        ordering = ORDERINGS[seed % len(ORDERINGS)]
        policy = JobPolicy(ordering, ALLOTMENTS[seed % 4], PLACEMENTS[seed % 3], sticky=seed % 2 == 0)
        record = run(trace, cluster, policy, EngineOptions(record_placements=True, speeds="matrix"))[0]
        for moment in moments(record):
            cpu, memory = np.zeros(group.count + 20), np.zeros(group.count + 20)
            for job, (event, where) in moment.holds.items():
                for node, gpus in where:
                    share = gpus / record.job("gpus")[job]
                    cpu[node] += record.events.cpu_milli[event] * share
                    memory[node] += record.events.memory_mb[event] * share
            assert cpu.max() <= group.cpus * 1000 + 1e-3
            assert memory.max() <= group.memory_bytes / 10**6 + 1e-3


@FUZZ
@given(runs())
def test_every_job_arrives_starts_and_ends_once_and_its_work_is_conserved(
    made: tuple[Record, Cluster, Trace, EngineOptions],
) -> None:
    record, _, _, chosen = made
    e = record.events
    cost_s = chosen.restart_cost_s + chosen.checkpoint_cost_s
    ends = finish_times(record)
    for job in range(record.jobs.height):
        mine = np.flatnonzero(e.job == job)
        kinds = [Kind(k) for k in e.kind[mine]]
        assert kinds.count(Kind.ARRIVE) == kinds.count(Kind.START) == kinds.count(Kind.FINISH) == 1
        assert kinds[0] == Kind.ARRIVE
        assert kinds[-1] == Kind.FINISH
        times = e.time_s[mine]
        assert times[0] == record.job("arrival_s")[job]
        assert times[kinds.index(Kind.START)] >= times[0]
        done = owed = 0.0
        speed, since = 0.0, 0.0
        for i, kind in zip(mine, kinds, strict=True):
            if kind in (*RUNNING, *STOPPED):
                ran = e.time_s[i] - since if speed else 0.0
                paid = min(owed, ran)
                owed -= paid
                done += speed * (ran - paid)
                speed, since = float(e.speed[i]), float(e.time_s[i])
            if kind in (Kind.RESUME, Kind.MOVE):
                owed += cost_s
        isolated = record.job("isolated_s")[job]
        if chosen.finish == "exact":
            assert done == pytest.approx(isolated, rel=1e-6, abs=1e-6)
        # GPUs are held until the end of the lease, so up to one lease too long; whole iterations lose less than one
        # iteration per lease
        else:
            assert done >= isolated * (1 - 1e-9)
            assert ends[job] % chosen.lease_s == pytest.approx(0, abs=1e-6)


@FUZZ
@given(runs(("tune",)))
def test_under_tune_nobody_runs_below_the_proportional_speed(
    made: tuple[Record, Cluster, Trace, EngineOptions],
) -> None:
    """On one node kind, where the reference speed is that of every node, and without a loss over nodes."""
    record, cluster, trace, chosen = made
    if len(cluster.groups) > 1:
        return
    stated = ~(np.isnan(trace.jobs.cpus) & np.isnan(trace.jobs.memory_bytes))
    e = record.events
    for i in np.flatnonzero(np.isin(e.kind, RUNNING)):
        job = e.job[i]
        alone = record.job("model")[job] not in ("odd", "local")
        # a job that asks for less than its share gets what it asks for
        if alone and (chosen.speeds == "two-speed" or not stated[job]):
            assert e.speed[i] >= 1 - 1e-9


@FUZZ
@given(runs(("tune", "proportional")))
def test_no_gpu_idles_while_a_gang_that_fits_waits(made: tuple[Record, Cluster, Trace, EngineOptions]) -> None:
    """At every tick, on equal nodes, for whole GPUs: proportional shares of free GPUs are always there to take."""
    record, cluster, trace, chosen = made
    nodes = node_list(cluster)
    gpus = record.job("gpus")
    if len(cluster.groups) > 1 or (gpus < 1).any():
        return
    ends = np.array(finish_times(record))
    for moment in moments(record):
        tick = moment.time_s / chosen.lease_s
        if tick != round(tick):
            continue
        free = sum(n.gpus for n in nodes) - sum(gpus[j] for j in moment.holds)
        here = np.flatnonzero((trace.jobs.arrival_s <= moment.time_s) & (ends > moment.time_s))
        waiting = [j for j in here if j not in moment.holds]
        assert all(gpus[j] > free for j in waiting), (moment.time_s, free, [gpus[j] for j in waiting])


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    cluster, trace = crowded_case(5)
    policy = JobPolicy("las", "tune", "consolidate", sticky=True)
    for name in ("a", "b"):
        run_training(trace, cluster, PROFILES, policy, EngineOptions(restart_cost_s=20.0), out=tmp_path / name)
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert files == ["events.parquet", "jobs.parquet", "rounds.parquet", "run.json"]
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


@pytest.mark.parametrize("ordering", ["srtf", "srsf", "drf", "tetris"])
def test_a_reservation_bounds_starvation(ordering: str) -> None:
    """One gang of all 8 GPUs against a stream of small jobs that keeps at least one GPU held at any time.

    Each small job runs for 1.5 leases and a new one comes every lease, so the gang never finds 8 free GPUs. With a
    reservation of T it goes first at the first tick at which it has waited for longer than T.
    """
    lease, small = 300.0, 200
    arrival = [0.0] + [i * lease for i in range(small)]
    jobs = Jobs.build(
        small + 1,
        id=["gang", *(f"s{i}" for i in range(small))],
        arrival_s=arrival,
        gpus=[8.0] + [1.0] * small,
        duration_s=[20_000.0] + [450.0] * small,
        model=["gnmt"] * (small + 1),
    )
    cluster = Cluster((NodeGroup(1, 8, CATALOG["A100-40GB"], 24, 500 * 10**9),))

    def start(reserve_after_s: float) -> float:
        policy = JobPolicy(ordering, "tune", reserve_after_s=reserve_after_s)
        record = run_training(Trace(jobs, "stream"), cluster, PROFILES, policy, EngineOptions())[0]
        e = record.events
        return float(e.time_s[(e.job == 0) & (e.kind == Kind.START)][0])

    assert start(3000.0) == 3300.0
    assert start(math.inf) >= small * lease
