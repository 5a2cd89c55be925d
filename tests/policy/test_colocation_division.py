"""How best-effort processes divide the bound in flight: worked cases, and that the sum stays within it."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.policy.colocation import APART, ColocationSettings, next_parts, share_ns

US = 1_000


def test_those_that_work_divide_the_bound_and_an_idle_one_takes_nothing() -> None:
    before = {"a": APART, "b": APART, "idle": APART}
    assert next_parts(before, ["a", "b"]) == {"a": 2, "b": 2, "idle": APART}
    assert next_parts(before, ["a"]) == {"a": 1, "b": APART, "idle": APART}


def test_where_all_are_idle_each_may_begin_with_an_equal_part() -> None:
    assert next_parts({"a": APART, "b": APART}, []) == {"a": 2, "b": 2}
    assert next_parts({"a": APART}, []) == {"a": 1}


def test_one_that_begins_has_its_part_once_the_others_have_given_it_up() -> None:
    first = next_parts({"a": 1, "idle": APART}, ["a", "idle"])
    assert first == {"a": 2, "idle": APART}
    assert next_parts(first, ["a", "idle"]) == {"a": 2, "idle": 2}


def test_what_an_idle_one_leaves_goes_to_the_others_a_look_later() -> None:
    first = next_parts({"a": 2, "b": 2}, ["a"])
    assert first == {"a": 2, "b": APART}
    assert next_parts(first, ["a"]) == {"a": 1, "b": APART}


def test_who_is_gone_divides_nothing() -> None:
    assert next_parts({"a": 2}, ["a", "gone"]) == {"a": 1}


def test_a_share_is_never_nothing() -> None:
    assert share_ns(100 * US, 4) == 25 * US
    assert share_ns(100 * US, APART) == 1
    assert ColocationSettings(in_flight_us=100).rule(tenants=APART).budget_ns == 1


SOME = st.integers(0, 127).map(lambda bits: {i for i in range(7) if bits >> i & 1})  # a subset of seven processes
LIVES = st.lists(SOME, min_size=1, max_size=60)  # which processes have work at each observation


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(SOME, SOME), min_size=1, max_size=60))
def test_whatever_comes_and_goes_the_sum_is_within_the_bound(lives: list[tuple[set[int], set[int]]]) -> None:
    """Even if some processes have read their new number and others have the one before in flight."""
    now: dict[int, int] = {}
    for worked, here in lives:
        before = {key: now.get(key, APART) for key in here}
        now = next_parts(before, worked)
        either = [min(before[key], now[key]) for key in here]
        assert sum(Fraction(1, parts) for parts in either if parts != APART) <= 1
        assert sum(share_ns(1000 * US, parts) for parts in either) <= 1000 * US + len(here)
        if worked >= here:
            assert all(parts >= len(here) for parts in now.values())


@settings(max_examples=200, deadline=None)
@given(LIVES, st.sets(st.integers(0, 6), min_size=1))
def test_two_looks_after_the_last_change_everybody_has_what_is_due(lives: list[set[int]], last: set[int]) -> None:
    now = dict.fromkeys(range(7), APART)
    for worked in [*lives, last, last]:
        now = next_parts(now, worked)
    assert now == {key: len(last) if key in last else APART for key in range(7)}
