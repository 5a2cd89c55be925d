"""The driver's log of context switches, read into what processes had."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cotenant.devices.context_switches import ENDS, SAVING_NS, STARTS, Runs

MS = 1_000_000


def test_a_process_that_runs_alone_has_the_gpu_until_now() -> None:
    runs = Runs()
    runs.note(STARTS, 7, 10 * MS)
    assert runs.until(60 * MS)[7] == (50 * MS, 0, 0)


def test_runs_shorter_than_their_slice_ended_for_lack_of_work() -> None:
    """On a card a launch-bound loop of 9 % of the time never had turns, as no record says that its queue ran dry."""
    runs = Runs()
    runs.whole_ns = {1: 30 * MS, 2: 15 * MS}
    at_ns = 0
    for _ in range(20):
        for pid, length_ns in ((1, MS), (2, 15 * MS)):
            runs.note(STARTS, pid, at_ns)
            at_ns += length_ns
            runs.note(ENDS, pid, at_ns)
    had = runs.until(at_ns)
    assert had[1] == (20 * (MS - SAVING_NS), 20, 20)
    assert had[2] == (20 * 15 * MS, 20, 0)


def test_nothing_is_said_of_a_process_whose_slice_is_not_known() -> None:
    runs = Runs()
    runs.note(STARTS, 3, 0)
    runs.note(ENDS, 3, 1000)
    assert runs.until(5 * MS)[3] == (0, 1, 0)


@given(st.lists(st.tuples(st.sampled_from([STARTS, ENDS, 0, 0xFE]), st.integers(1, 3), st.integers(0, 9 * MS))))
def test_nobody_ever_has_more_than_the_time_that_passed(records: list[tuple[int, int, int]]) -> None:
    """Records may be missing: the buffer drops some when nobody reads."""
    runs, at_ns = Runs(), 0
    runs.whole_ns = {1: 2 * MS}
    for tag, pid, later_ns in records:
        at_ns += later_ns
        runs.note(tag, pid, at_ns)
    had = runs.until(at_ns)
    assert sum(each.busy_ns for each in had.values()) <= at_ns
    assert all(0 <= each.yields <= each.runs and each.busy_ns >= 0 for each in had.values())
