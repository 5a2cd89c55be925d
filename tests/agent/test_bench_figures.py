"""The arithmetic of the benchmarks, by hand."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from cotenant.bench.overhead import Block, core_of_its_own, median_interval, summary, summary_of_processes
from cotenant.bench.shares import BUSY, COUNT, between, granted_shares, worst_window_error
from cotenant.bench.workload import GpuTime, run_block

SECOND = 10**9


@pytest.mark.parametrize(
    ("requests", "limits", "granted"),
    [
        ([0.3, 0.7], [1.0, 1.0], [0.3, 0.7]),
        ([0.0], [0.25], [0.25]),
        ([0.2, 0.3], [1.0, 1.0], [0.5, 0.5]),  # the rest goes to the tenants that have least
        ([0.6, 0.1, 0.1], [1.0, 1.0, 1.0], [0.6, 0.2, 0.2]),
        ([0.0, 0.0], [0.2, 1.0], [0.2, 0.8]),
        ([0.1, 0.1], [0.3, 0.4], [0.3, 0.4]),  # the limits leave part of the GPU idle
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
    assert between(BLOCK, 5 * SECOND, 15 * SECOND, COUNT) == 100  # 75 of the first half and 25 of the second
    assert between(BLOCK, 10 * SECOND, 20 * SECOND, BUSY) == 6 * SECOND
    assert between(BLOCK, 0, 99 * SECOND, COUNT) == 200


def test_worst_window() -> None:
    # The tenant gets 40 % of the first ten seconds and 60 % of the last ten. It was granted half, and the run keeps the
    # GPU busy.
    assert worst_window_error([BLOCK], [0.5], 1.0, 0, 20 * SECOND) == pytest.approx(0.1)


def test_a_pair_of_events_around_a_wait_counts_as_the_median() -> None:
    gpu_time = GpuTime()
    assert [gpu_time.unit(n) for n in (100, 102, 98, 5000, 101)] == [100, 102, 98, 100, 101]


def test_a_block_counts_what_is_done() -> None:
    steps = iter([(1, 10)] * 10_000)
    done = run_block(lambda: next(steps), lambda: (3, 30), 0.001)
    assert done["count"] >= 4
    assert done["busy_ns"] == 10 * done["count"]


def test_a_block_can_time_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns, steps_ns = [7], list[int]()
    monkeypatch.setattr("cotenant.bench.workload.time", SimpleNamespace(monotonic_ns=lambda: now_ns[0]))

    def work(ns: int) -> tuple[int, int]:
        now_ns[0] += ns
        return 1, 0

    done = run_block(lambda: work(300_000), lambda: work(50_000), 0.001, steps_ns)
    assert steps_ns == [300_000] * 4
    assert (done["count"], done["begin_ns"], done["end_ns"]) == (5, 7, 1_250_007)


def blocks(*rates: float) -> list[Block]:
    """Blocks of 20 equal steps."""
    return [Block(rate, [round(SECOND / rate)] * 20) for rate in rates]


def test_interval_of_the_median() -> None:
    # For 10 pairs, P(fewer than 2 values below the median) = 11/1024, and twice that is 2.1 %. So the interval is from
    # the second value to the ninth.
    assert median_interval(10) == (1, 8)
    row = summary(blocks(*[100.0] * 10), blocks(*(99.0 + index / 10 for index in range(10))))
    assert row["ratio"] == pytest.approx(0.9945)
    assert row["ratio_ci95"] == [pytest.approx(0.991), pytest.approx(0.998)]


def test_the_slowest_tenth_is_left_out_of_the_steps() -> None:
    """One step of each 20 took a hundred times as long, on one side: the blocks lose, the trimmed steps do not."""
    slow = [Block(100.0 / 5.95, [*[10_000_000] * 19, 1_000_000_000])] * 5
    row = summary(blocks(*[100.0] * 5), slow)
    assert row["ratio"] == pytest.approx(1 / 5.95)
    assert row["ratio_trimmed"] == pytest.approx(1.0)
    # every other step is longer, which trimming must not leave out
    half = [Block(100.0 / 1.5, [10_000_000, 20_000_000] * 10)] * 5
    # 90 of 100 steps are kept: 50 of 10 ms and 40 of 20 ms
    assert summary(blocks(*[100.0] * 5), half)["ratio_trimmed"] == pytest.approx(10 / (1300 / 90))


def test_several_processes_make_the_interval() -> None:
    """Two of three programs lost 1 %, one 9 %: the median of them is 0.99, and three are too few to leave any out."""
    pairs = [(100.0, 99.0), (50.0, 45.5), (10.0, 9.9)]
    row = summary_of_processes([[blocks(*[native] * 5), blocks(*[tenant] * 5)] for native, tenant in pairs])
    assert row["by_process"] == [pytest.approx(0.99), pytest.approx(0.91), pytest.approx(0.99)]
    assert (row["ratio"], row["ratio_trimmed"]) == (pytest.approx(0.99), pytest.approx(0.99))
    assert row["ratio_ci95"] == [pytest.approx(0.91), pytest.approx(0.99)]


def test_nothing_else_runs_on_the_core_of_the_launches() -> None:
    before = os.sched_getaffinity(0)
    with core_of_its_own() as core:
        assert core in before
        assert core not in os.sched_getaffinity(0) or len(before) == 1
    assert os.sched_getaffinity(0) == before
