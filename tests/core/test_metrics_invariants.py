"""What holds for every run, and agreement with a plain event-by-event count and with published results."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_records import hand_record, random_record

from cotenant.core.events import Kind, Reason
from cotenant.core.metrics.cluster import RESOURCES
from cotenant.core.metrics.summary import Analysis, summarise
from cotenant.core.record.record import Record

HOLDS = {Kind.START, Kind.RESUME, Kind.MOVE, Kind.RESIZE}
RUNS = st.builds(
    random_record,
    seed=st.integers(0, 10_000),
    jobs=st.integers(1, 30),
    nodes=st.integers(1, 3),
    gpus=st.integers(1, 4),
    rate_per_h=st.floats(1, 60),
    boost=st.sampled_from([1.0, 2.0, 4.0]),
    lease=st.sampled_from([60.0, 300.0]),
)


def count_plainly(record: Record) -> dict[str, object]:
    """Running seconds per job and held GPU-, core- and useful core-seconds, one event after the other."""
    jobs, events = record.jobs.to_dicts(), record.events
    running: dict[int, float] = defaultdict(float)
    state: dict[int, tuple[float, bool, float]] = {}
    gpus = cores = useful = 0.0
    for i in range(len(events) + 1):
        closing = [int(events.job[i])] if i < len(events) else list(state)
        now = float(events.time_s[i]) if i < len(events) else record.end_s
        for j in closing:
            since, holds, cpus = state.get(j, (now, False, 0.0))
            if holds:
                running[j] += now - since
                gpus += jobs[j]["gpus"] * (now - since)
                cores += cpus * (now - since)
                useful += min(cpus, jobs[j]["ideal_cpus"]) * (now - since)
            if i < len(events):
                state[j] = (now, Kind(events.kind[i]) in HOLDS, events.cpu_milli[i] / 1000)
    return {"running": running, "gpus": gpus, "cores": cores, "useful": useful}


@settings(max_examples=60, deadline=None)
@given(RUNS)
def test_every_run(record: Record) -> None:
    analysis = Analysis(record)
    jobs, summary = analysis.jobs, analysis.summary
    assert summary["jobs_completed"] == record.jobs.height
    assert (jobs.queueing_s >= 0).all()
    np.testing.assert_allclose(jobs.jct_s, jobs.running_s + jobs.queueing_s, atol=1e-6)
    assert (jobs.first_start_s >= record.job("arrival_s")).all()
    assert (jobs.ftf_rho <= jobs.slowdown + 1e-9).all()
    for name in RESOURCES:
        assert 0 <= summary["utilisation"][name] <= summary["allocation"][name] + 1e-9 <= 1 + 2e-9
    assert 0 <= summary["fragmentation"] <= 1
    for key in ("jct_s", "queueing_s", "slowdown", "ftf_rho"):
        ranks = [summary[key][name] for name in ("median", "p95", "p99", "p999")]
        assert ranks == sorted(ranks)


@settings(max_examples=40, deadline=None)
@given(RUNS)
def test_agrees_with_a_plain_count(record: Record) -> None:
    plain, analysis = count_plainly(record), Analysis(record)
    for j in range(record.jobs.height):
        assert analysis.jobs.running_s[j] == pytest.approx(plain["running"][j], abs=1e-6)  # type: ignore[index]
    span = analysis.timeline.end_s - analysis.timeline.first_s
    cluster, summary = record.info.cluster, analysis.summary
    assert summary["allocation"]["gpu"] == pytest.approx(plain["gpus"] / (cluster["gpus"] * span))  # type: ignore[operator]
    assert summary["allocation"]["cpu"] == pytest.approx(plain["cores"] / (cluster["cpus"] * span))  # type: ignore[operator]
    assert summary["utilisation"]["cpu"] == pytest.approx(plain["useful"] / (cluster["cpus"] * span))  # type: ignore[operator]


@settings(max_examples=40, deadline=None)
@given(RUNS, st.integers(1, 50))
def test_series_average_to_the_summary(record: Record, bins: int) -> None:
    analysis = Analysis(record)
    series = analysis.series(bins)
    for values, key, name in (
        (series.gpu, "allocation", "gpu"),
        (series.cpu, "allocation", "cpu"),
        (series.useful_cpu, "utilisation", "cpu"),
        (series.useful_memory, "utilisation", "memory"),
    ):
        assert values.mean() == pytest.approx(analysis.summary[key][name], abs=1e-9)
        assert values.min() >= -1e-9
    assert series.stranded.mean() == pytest.approx(analysis.summary["fragmentation"], abs=1e-9)
    assert series.running.mean() * (series.edges_s[-1] - series.edges_s[0]) == pytest.approx(
        analysis.jobs.running_s.sum(), rel=1e-9
    )
    assert (series.wanted >= series.gpu - 1e-9).all()


@pytest.mark.parametrize("trace", ["multi_1000_4jph", "static_1000_single", "stress_multi"])
def test_means_and_makespans_of_the_published_schedule(shared: Path, trace: str) -> None:
    """Completion times per job of a reference schedule give its stated mean JCT and makespan (from time 0)."""
    folder = shared / "reference" / "synergy"
    with (folder / f"{trace}.csv").open() as file:
        jobs = [{"id": r[0], "arrival_s": float(r[2]), "gpus": float(r[4])} for r in csv.reader(file)]
    with (folder / f"{trace}.jct_s.csv").open() as file:
        jct = {row["job"]: row for row in csv.DictReader(file)}
    with (folder / "results.csv").open() as file:
        stated = {row["policy"]: row for row in csv.DictReader(file) if row["trace"] == trace}
    row = {job["id"]: i for i, job in enumerate(jobs)}
    for policy in ("fifo+proportional", "srtf+tune"):
        finish = sorted((jobs[row[i]]["arrival_s"] + float(values[policy]), row[i]) for i, values in jct.items())
        record = hand_record(jobs, [(t, j, Kind.FINISH, Reason.DONE) for t, j in finish], placements=False)
        got = summarise(record)
        assert got["jct_s"]["mean"] / 3600 == pytest.approx(float(stated[policy]["mean_jct_h"]), abs=1e-4)
        assert got["makespan_s"] / 3600 == pytest.approx(float(stated[policy]["makespan_h"]), abs=1e-6)
