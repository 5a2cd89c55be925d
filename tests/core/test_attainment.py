"""Intervals of shares and the number of requests that tell two of them apart: published values and simulation."""

from __future__ import annotations

import math
import random
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.metrics.attainment import REQUESTS_TO_TELL, attainment, wilson_interval


def test_the_interval_has_published_values() -> None:
    # Newcombe 1998, Statistics in Medicine 17, table I, method 3 (score without continuity correction)
    assert wilson_interval(81, 263) == pytest.approx([0.2553, 0.3662], abs=5e-5)
    assert wilson_interval(15, 148) == pytest.approx([0.0624, 0.1605], abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx([0.0, 0.1611], abs=5e-5)
    assert wilson_interval(1, 29) == pytest.approx([0.0061, 0.1718], abs=5e-5)


@given(st.integers(0, 500), st.integers(0, 500))
def test_the_interval_holds_the_share(hits: int, misses: int) -> None:
    low, high = wilson_interval(hits, hits + misses)
    assert 0 <= low <= high <= 1
    if hits + misses:
        assert low - 1e-12 <= hits / (hits + misses) <= high + 1e-12


def test_so_many_requests_do_tell_them_apart() -> None:
    """1,597 tell 99 from 99.5 % with 5 % and 20 % wrong: counted over draws, at the cut of the normal approximation."""
    count = REQUESTS_TO_TELL
    normal = NormalDist()
    root = normal.inv_cdf(0.95) * (0.995 * 0.005) ** 0.5 + normal.inv_cdf(0.8) * (0.99 * 0.01) ** 0.5
    assert count == math.ceil((root / 0.005) ** 2)
    cut = count * 0.995 - 1.645 * (count * 0.995 * 0.005) ** 0.5
    draw = random.Random(1)

    def below(share: float) -> float:
        tries = 400
        return sum(sum(draw.random() < share for _ in range(count)) < cut for _ in range(tries)) / tries

    assert below(0.995) < 0.1
    assert below(0.99) > 0.75


def test_a_share_of_latencies() -> None:
    share, (low, high) = attainment([1.0, 2.0, 3.0, 9.0], 3.0)
    assert share == 0.75
    assert low < 0.75 < high
    assert attainment([], 1.0) == (0.0, [0.0, 1.0])
