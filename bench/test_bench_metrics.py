"""Compares the metrics of a run with the same sums event by event, and measures how their time grows up to a million
jobs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cotenant.core.events import Kind
from cotenant.core.metrics.summary import Analysis, summarise
from cotenant.core.metrics.timeline import HOLDING
from cotenant.core.record.record import Record, jobs_table
from cotenant.core.record.schema import RunInfo
from cotenant.core.record.writer import RecordWriter
from cotenant.core.work import Jobs


def record(jobs: int, changes: int, path: Path | None = None) -> Record:
    """Jobs that arrive, start, change CPU `changes` times and finish, all interleaved; drawn with a fixed seed."""
    rng = np.random.default_rng(0)
    arrival = np.cumsum(rng.exponential(2.0, jobs))
    table = jobs_table(
        Jobs.build(
            jobs,
            id=np.arange(jobs).astype(str),
            arrival_s=arrival,
            gpus=rng.choice([1.0, 2, 4, 8], jobs),
            duration_s=rng.exponential(5000, jobs),
        )
    )
    steps = [Kind.ARRIVE, Kind.START, *[Kind.RESIZE] * changes, Kind.FINISH]
    time_s = np.concatenate([arrival + 300.0 * i for i in range(len(steps))])
    kind = np.repeat(np.array(steps, dtype=np.int8), jobs)
    order = np.argsort(time_s, kind="stable")
    info = RunInfo("x", placements=False, cluster={"gpus": 10_000, "cpus": 30_000, "memory_bytes": 10**15})
    writer = RecordWriter(path, info, table)
    for rows in np.array_split(order, max(1, len(order) // 65_536)):
        n = len(rows)
        writer.append_events(
            time_s=time_s[rows], job=rows % jobs, kind=kind[rows], reason=np.zeros(n), cpu_milli=np.full(n, 3000),
            memory_mb=np.full(n, 62_500), speed=np.ones(n),
        )  # fmt: skip
    return writer.close()


def running_plainly(run: Record) -> float:
    """Total running time and held core-time, computed event by event."""
    since: dict[int, tuple[float, bool, float]] = defaultdict(lambda: (0.0, False, 0.0))
    total = cores = 0.0
    holding = {int(kind) for kind in HOLDING}
    events = run.events
    for t, job, kind, cpu in zip(
        events.time_s.tolist(), events.job.tolist(), events.kind.tolist(), events.cpu_milli.tolist(), strict=True
    ):
        before, held, cpus = since[job]
        if held:
            total += t - before
            cores += cpus * (t - before)
        since[job] = (t, kind in holding, cpu / 1000)
    return total


def quickest(work: Callable[[], Any], times: int = 3) -> tuple[float, Any]:
    """Shortest wall time of several runs, and the result of the last."""
    seconds, result = [], None
    for _ in range(times):
        started = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - started)
    return min(seconds), result


def test_metrics_against_a_plain_loop() -> None:
    run = record(50_000, 8)
    plain_s, plain = quickest(lambda: running_plainly(run))
    vector_s, summary = quickest(lambda: summarise(run))
    assert abs(Analysis(run).jobs.running_s.sum() - plain) < 1e-6 * plain
    assert summary["jobs_completed"] == 50_000
    print(f"\n{len(run.events):,} events: two sums in a loop {plain_s:.2f} s, every metric {vector_s:.2f} s, "
          f"ratio {plain_s / vector_s:.1f}")  # fmt: skip
    assert vector_s < plain_s


def test_growth_to_a_million_jobs(tmp_path: Path) -> None:
    per_event = []
    for jobs in (10_000, 100_000, 1_000_000):
        started = time.perf_counter()
        run = record(jobs, 4, tmp_path / str(jobs))
        written_s = time.perf_counter() - started
        metrics_s, _ = quickest(lambda run=run: summarise(run), times=2)  # type: ignore[misc]
        n = len(run.events)
        per_event.append(metrics_s / n)
        print(f"\n{jobs:>9,} jobs, {n:>9,} events: made, written and read back {written_s:5.2f} s, "
              f"metrics {metrics_s:5.2f} s = {metrics_s / n * 1e9:.0f} ns an event")  # fmt: skip
    # near-linear: an event of the largest run costs at most four times one of the middle run (caches)
    assert per_event[2] < 4 * per_event[1] + 1e-7
