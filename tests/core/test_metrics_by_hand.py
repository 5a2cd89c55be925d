"""Metrics of a run small enough to work out by hand.

Cluster: 2 nodes x 4 GPUs, 24 cores and 500 GB each: 8 GPUs, 48 cores, 1000 GB.

    time   0        10       20           50           60                     100                  160
    a(4)   runs 12c .................................. loses its GPUs ....... runs 24c ............ done
    b(8)            waits ............................ runs 24c ............. done
    c(1)                     runs 3c      grows to 6c  done

Running:   a 60 + 60 = 120, b 40, c 40.   JCT: a 160, b 100 - 10 = 90, c 60 - 20 = 40.
Queueing:  a 160 - 120 = 40, b 90 - 40 = 50, c 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sample_records import hand_record

from cotenant.core.events import Kind, Reason
from cotenant.core.metrics.registry import METRICS, lookup
from cotenant.core.metrics.summary import Analysis, breakdown, spread, summarise
from cotenant.core.metrics.timeline import mean_in_bins, order_by_job
from cotenant.core.record.record import Record

NAN = float("nan")
JOBS: list[dict[str, Any]] = [
    {"id": "a", "arrival_s": 0.0, "gpus": 4.0, "isolated_s": 100.0, "ideal_cpus": 24.0, "ideal_memory_bytes": 100e9},
    {"id": "b", "arrival_s": 10.0, "gpus": 8.0, "isolated_s": 50.0, "ideal_cpus": 8.0, "ideal_memory_bytes": 400e9},
    {"id": "c", "arrival_s": 20.0, "gpus": 1.0, "isolated_s": 20.0, "ideal_cpus": 4.0, "ideal_memory_bytes": NAN},
]
EVENTS = [
    (0.0, 0, Kind.ARRIVE, Reason.NONE),
    (0.0, 0, Kind.START, Reason.IN_ORDER, 12, 200, 1.0, [(0, 4.0)]),
    (10.0, 1, Kind.ARRIVE, Reason.NONE),
    (10.0, 1, Kind.WAIT, Reason.GANG_TOO_LARGE_NOW),
    (20.0, 2, Kind.ARRIVE, Reason.NONE),
    (20.0, 2, Kind.START, Reason.IN_ORDER, 3, 50, 0.5, [(1, 1.0)]),
    (50.0, 2, Kind.RESIZE, Reason.GOT_IDEAL, 6, 50, 0.5, [(1, 1.0)]),
    (60.0, 2, Kind.FINISH, Reason.DONE),
    (60.0, 0, Kind.PREEMPT, Reason.OUTRANKED),
    (60.0, 1, Kind.START, Reason.RESERVED, 24, 500, 1.25, [(0, 4.0), (1, 4.0)]),
    (100.0, 1, Kind.FINISH, Reason.DONE),
    (100.0, 0, Kind.RESUME, Reason.IN_ORDER, 24, 200, 1.0, [(1, 4.0)]),
    (160.0, 0, Kind.FINISH, Reason.DONE),
]
# GPUs held, GPUs free on empty nodes, jobs running, jobs waiting. From 20 to 60 s, 8 - 5 = 3 GPUs are free, but none on
# an empty node, so b waits.
AFTER = [(0, 4, 4, 1, 0), (10, 4, 4, 1, 1), (20, 5, 0, 2, 1), (60, 8, 0, 1, 1), (100, 4, 4, 1, 0), (160, 0, 8, 0, 0)]
NAMES = ("time_s", "gpus_held", "gpus_free_whole_nodes", "running", "waiting")
OTHERS = {"gpus_wanted": 0, "cpu_milli_held": 0, "memory_mb_held": 0}
ROUNDS = [dict(zip(NAMES, row, strict=True)) | OTHERS for row in AFTER]


@pytest.fixture(scope="module", params=[True, False], ids=["placements", "no placements"])
def record(request: pytest.FixtureRequest) -> Record:
    return hand_record(JOBS, EVENTS, rounds=ROUNDS, placements=request.param)


def test_times_of_jobs(record: Record) -> None:
    jobs = Analysis(record).jobs
    assert jobs.finish_s.tolist() == [160, 100, 60]
    assert jobs.first_start_s.tolist() == [0, 60, 20]
    assert jobs.jct_s.tolist() == [160, 90, 40]
    assert jobs.running_s.tolist() == [120, 40, 40]
    assert jobs.queueing_s.tolist() == [40, 50, 0]
    assert jobs.response_s.tolist() == [0, 50, 0]
    assert jobs.slowdown.tolist() == [160 / 100, 90 / 50, 40 / 20]
    assert jobs.preemptions.tolist() == [1, 0, 0]


def test_finish_time_fairness(record: Record) -> None:
    """Unfinished jobs: 1 in 0-10, 2 in 10-20, 3 in 20-60, 2 in 60-100, 1 in 100-160.

    a lives through all: (10 + 20 + 120 + 80 + 60) / 160 = 1.8125 on average; 4 x 1.8125 / 8 < 1, so rho = slowdown.
    b: (20 + 120 + 80) / 90 = 22/9; 8 x 22/9 / 8 = 22/9, rho = 90 / (50 x 22/9) = 81/110.
    c: 3; 1 x 3 / 8 < 1, rho = slowdown.
    """
    np.testing.assert_allclose(Analysis(record).jobs.ftf_rho, [1.6, 81 / 110, 2.0])


def test_summary(record: Record) -> None:
    got = summarise(record)
    assert (got["jobs"], got["jobs_completed"], got["jobs_rejected"], got["jobs_unfinished"]) == (3, 3, 0, 0)
    # For the values 40, 90 and 160, the rank (n - 1) q is 1.9 for p95, 1.98 for p99 and 1.998 for p99.9.
    assert got["jct_s"] == pytest.approx(
        {"mean": 290 / 3, "median": 90, "p95": 90 + 0.9 * 70, "p99": 90 + 0.98 * 70, "p999": 90 + 0.998 * 70}
    )
    assert got["queueing_s"]["mean"] == 30
    assert (got["response_s"]["mean"], got["response_s"]["median"]) == (50 / 3, 0)
    assert got["slowdown"]["median"] == 1.8
    assert got["makespan_s"] == 160
    assert (got["preemptions"], got["rounds"], got["deadlines_met"]) == (1, 6, None)
    assert got["moves"] == (0 if record.info.placements else None)


def test_utilisation_and_allocation(record: Record) -> None:
    """GPUs: a 4 x 120, b 8 x 40, c 1 x 40 = 840 of 8 x 160. Cores held: a 12 x 60 + 24 x 60, b 24 x 40,
    c 3 x 30 + 6 x 10 = 3270 of 48 x 160; of use (at most 24, 8, 4): 2160 + 8 x 40 + 3 x 30 + 4 x 10 = 2610.
    Memory held: 200 x 120 + 500 x 40 + 50 x 40 = 46000 of 1000 x 160; of use (100, 400, not known): 30000."""
    got = summarise(record)
    assert got["allocation"] == pytest.approx({"gpu": 840 / 1280, "cpu": 3270 / 7680, "memory": 46 / 160})
    assert got["utilisation"] == pytest.approx({"gpu": 840 / 1280, "cpu": 2610 / 7680, "memory": 30 / 160})


def test_fragmentation(record: Record) -> None:
    """3 GPUs stranded for 40 s of 160 s, of 8."""
    assert summarise(record)["fragmentation"] == pytest.approx(3 * 40 / (8 * 160))


def test_series_in_four_bins_of_40_s(record: Record) -> None:
    got = Analysis(record).series(bins=4)
    assert got.edges_s.tolist() == [0, 40, 80, 120, 160]
    # GPU-seconds in each interval, of 320: a 160 + c 20; a 80 + c 20 + b 160; b 160 + a 80; a 160.
    np.testing.assert_allclose(got.gpu, [180 / 320, 260 / 320, 240 / 320, 160 / 320])
    np.testing.assert_allclose(got.running, [1.5, 1.5, 1, 1])
    np.testing.assert_allclose(got.waiting, [30 / 40, 1, 20 / 40, 0])  # b waits from 10 to 60, then a until 100
    np.testing.assert_allclose(got.wanted, [420 / 320, (160 + 320 + 20) / 320, (160 + 160) / 320, 0.5])
    np.testing.assert_allclose(got.stranded, [60 / 320, 60 / 320, 0, 0], atol=1e-12)
    # core-seconds in each interval, of 48 x 40: a 480 + c 60; a 240 + c 30 + 60 + b 480; b 480 + a 480; a 960
    np.testing.assert_allclose(got.cpu, np.array([540, 810, 960, 960]) / 1920)


def test_breakdown_by_group(record: Record) -> None:
    got = breakdown(Analysis(record), np.array(["x", "y", "x"]))
    assert [(e["group"], e["jobs"], e["jct_s"]["mean"]) for e in got] == [("x", 2, 100), ("y", 1, 90)]
    by_gpus = breakdown(Analysis(record), record.job("gpus"))
    assert [(e["group"], e["queueing_s"]["mean"]) for e in by_gpus] == [(1, 0), (4, 40), (8, 50)]


def test_a_run_cut_short_counts_only_what_finished() -> None:
    """Cut at 60 after b started: a and b are unfinished; the window is 0 to 60: a 4 x 60 + c 40 = 280 of 480."""
    got = summarise(hand_record(JOBS, EVENTS[:10]))
    assert (got["jobs_completed"], got["jobs_unfinished"]) == (1, 2)
    assert got["jct_s"]["mean"] == 40
    assert got["makespan_s"] == 60
    assert got["allocation"]["gpu"] == pytest.approx(280 / 480)
    assert got["fragmentation"] is None


def test_nothing_finished_gives_no_numbers_rather_than_zeros() -> None:
    got = summarise(hand_record(JOBS, EVENTS[:1]))
    assert got["jct_s"] == dict.fromkeys(("mean", "median", "p95", "p99", "p999"))
    assert got["makespan_s"] is None
    assert got["utilisation"] == {"gpu": None, "cpu": None, "memory": None}


def test_rejected_jobs_neither_count_nor_contend() -> None:
    jobs = [*JOBS[:1], {**JOBS[1], "gpus": 99.0}]
    events = [*EVENTS[:3], (10.0, 1, Kind.REJECT, Reason.GANG_TOO_LARGE_NOW), (100.0, 0, Kind.FINISH, Reason.DONE)]
    record = hand_record(jobs, events)
    got = summarise(record)
    assert (got["jobs_completed"], got["jobs_rejected"], got["jobs_unfinished"]) == (1, 1, 0)
    assert got["jct_s"]["mean"] == 100
    assert Analysis(record).jobs.ftf_rho[0] == 1.0


def test_deadlines() -> None:
    jobs = [{**j, "deadline_s": d} for j, d in zip(JOBS, (160.0, 99.0, NAN), strict=True)]
    assert summarise(hand_record(jobs, EVENTS))["deadlines_met"] == 0.5


def test_moves_are_counted() -> None:
    events = [*EVENTS[:6], (50.0, 2, Kind.MOVE, Reason.REPLACED, 3, 50, 0.5, [(1, 1.0)]), *EVENTS[7:]]
    assert summarise(hand_record(JOBS, events))["moves"] == 1


def test_spread_leaves_out_what_is_not_known() -> None:
    assert spread(np.array([NAN, 1.0, 3.0]))["mean"] == 2.0


def test_lookup_follows_every_registered_metric(record: Record) -> None:
    summary = summarise(record)
    assert lookup(summary, "jct_s.mean") == pytest.approx(290 / 3)
    assert lookup(summary, "utilisation.gpu") == pytest.approx(0.65625)
    assert lookup(summary, "nothing.here") is None
    for key in METRICS:
        top = key.split(".")[0]
        assert top in summary


def test_mean_in_bins_before_within_and_after() -> None:
    """2 from second 1 on, 5 from second 3 on: bins 0-2, 2-4, 4-6."""
    got = mean_in_bins(np.array([1.0, 3.0]), np.array([2.0, 3.0]), np.array([0.0, 2.0, 4.0, 6.0]))
    np.testing.assert_allclose(got, [1.0, 3.5, 5.0])


def test_order_by_job_is_stable_beyond_16_bits() -> None:
    job = np.array([70000, 3, 70000, 3, 65536, 0], dtype=np.int32)
    assert order_by_job(job).tolist() == [5, 1, 3, 4, 0, 2]


def test_figures_of_jobs_cover_only_the_measured_ones() -> None:
    # Of the jobs a, b, c only 1 and 2 are measured: JCTs of 90 and 40 s, queueing times of 50 and 0 s. Figures of the
    # whole cluster do not change.
    whole = summarise(hand_record(JOBS, EVENTS, rounds=ROUNDS))
    record = hand_record(JOBS, EVENTS, rounds=ROUNDS, options={"measure": [1, 3]})
    got = summarise(record)
    assert (got["jct_s"]["mean"], got["jct_s"]["median"], got["queueing_s"]["mean"]) == (65.0, 65.0, 25.0)
    assert [got[key] for key in ("jobs_completed", "makespan_s", "utilisation")] == [
        whole[key] for key in ("jobs_completed", "makespan_s", "utilisation")
    ]
    by_gpus = breakdown(Analysis(record), record.job("gpus"))
    assert [(entry["group"], entry["jobs"]) for entry in by_gpus] == [(1.0, 1), (8.0, 1)]
