"""The arithmetic of the benchmarks, by hand."""

from __future__ import annotations

import pytest

from cotenant.bench.overhead import median_interval, summary, summary_of_processes
from cotenant.bench.shares import BUSY, COUNT, between, granted_shares, worst_window_error
from cotenant.bench.workload import GpuTime, run_block

SECOND = 10**9


@pytest.mark.parametrize(
    ("requests", "limits", "granted"),
    [
        ([0.3, 0.7], [1.0, 1.0], [0.3, 0.7]),
        ([0.0], [0.25], [0.25]),
        ([0.2, 0.3], [1.0, 1.0], [0.5, 0.5]),  # the rest goes to whoever has least
        ([0.6, 0.1, 0.1], [1.0, 1.0, 1.0], [0.6, 0.2, 0.2]),
        ([0.0, 0.0], [0.2, 1.0], [0.2, 0.8]),
        ([0.1, 0.1], [0.3, 0.4], [0.3, 0.4]),  # the limits leave the GPU idle
    ],
)
def test_granted_by_water_filling(requests: list[float], limits: list[float], granted: list[float]) -> None:
    assert granted_shares(requests, limits) == pytest.approx(granted)


BLOCK = {
    "begin_ns": 0,
    "end_ns": 20 * SECOND,
    "count": 200,
    "busy_ns": 10 * SECOND,
    "marks": [[10 * SECOND, 150, 4 * SECOND]],
}


def test_work_and_time_between_two_moments() -> None:
    assert between(BLOCK, 0, 10 * SECOND, COUNT) == 150
    assert between(BLOCK, 5 * SECOND, 15 * SECOND, COUNT) == 100  # 75 of the first half, 25 of the second
    assert between(BLOCK, 10 * SECOND, 20 * SECOND, BUSY) == 6 * SECOND
    assert between(BLOCK, 0, 99 * SECOND, COUNT) == 200


def test_worst_window() -> None:
    # 40 % of the first ten seconds, 60 % of the last; granted a half of a run that keeps the GPU busy
    assert worst_window_error([BLOCK], [0.5], 1.0, 0, 20 * SECOND) == pytest.approx(0.1)


def test_a_pair_of_events_around_a_wait_counts_as_the_median() -> None:
    gpu_time = GpuTime()
    assert [gpu_time.unit(n) for n in (100, 102, 98, 5000, 101)] == [100, 102, 98, 100, 101]


def test_a_block_counts_what_is_done() -> None:
    steps = iter([(1, 10)] * 10_000)
    done = run_block(lambda: next(steps), lambda: (3, 30), 0.001)
    assert done["count"] >= 4
    assert done["busy_ns"] == 10 * done["count"]


def test_interval_of_the_median() -> None:
    # for 10 pairs, P(fewer than 2 below the median) = 11/1024, twice that is 2.1 %: the second and the ninth
    assert median_interval(10) == (1, 8)
    row = summary([(100.0, 99.0 + index / 10) for index in range(10)])
    assert row["ratio"] == pytest.approx(0.9945)
    assert row["ratio_ci95"] == [pytest.approx(0.991), pytest.approx(0.998)]


def test_several_processes_make_the_interval() -> None:
    """Two of three programs lost 1 %, one 9 %: the median of them is 0.99, and three are too few to leave any out."""
    row = summary_of_processes([[(100.0, 99.0)] * 5, [(50.0, 45.5)] * 5, [(10.0, 9.9)] * 5])
    assert row["by_process"] == [pytest.approx(0.99), pytest.approx(0.91), pytest.approx(0.99)]
    assert row["ratio"] == pytest.approx(0.99)
    assert row["ratio_ci95"] == [pytest.approx(0.91), pytest.approx(0.99)]
