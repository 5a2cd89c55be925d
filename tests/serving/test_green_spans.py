"""Shares as whole pieces of a GPU: neighbours never share one, however many pieces the card has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cotenant.devices.green import span


def test_quarters_of_fifteen_pieces() -> None:
    """An H200 has 132 SMs and cuts into 15 groups of 8: rounding lengths let the last two quarters overlap."""
    assert [span(start, 0.25, 15) for start in (0.0, 0.25, 0.5, 0.75)] == [(0, 4), (4, 4), (8, 3), (11, 4)]
    assert [span(0.0, 0.25, 15), span(0.25, 0.75, 15)] == [(0, 4), (4, 11)]


def test_a_share_that_is_larger_than_what_is_left_begins_earlier() -> None:
    assert span(0.5, 0.75, 16) == (4, 12)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(8, 64))
def test_shares_side_by_side_are_disjoint_and_inside(parts: list[int], pieces: int) -> None:
    total, start, taken = sum(parts), 0.0, []
    for part in parts:
        first, count = span(start, part / total, pieces)
        assert count >= 1
        assert 0 <= first <= pieces - count
        # a share smaller than one piece still gets one
        if round((start + part / total) * pieces) > round(start * pieces):
            taken.append(frozenset(range(first, first + count)))
        start += part / total
    assert sum(map(len, taken)) == len(frozenset().union(*taken))
