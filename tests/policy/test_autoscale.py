"""Forecasts and the number of GPUs: worked out by hand, and compared on seeded rates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.policy.serving.autoscale import Autoscaler, Ewma, Trend


def test_ewma_by_hand() -> None:
    """alpha = 2 / 41; 1.5 below 125 requests/s, 1.2 above."""
    tracked = Ewma()
    tracked.observe(100.0)
    assert tracked.forecast(40) == pytest.approx(150.0)
    tracked.observe(200.0)
    assert tracked.rate_rps == pytest.approx(100 + 100 * 2 / 41)
    tracked.observe(1000.0)
    assert tracked.forecast(40) == pytest.approx(tracked.rate_rps * 1.2)
    assert Ewma().forecast(40) == 0.0


def shortfall(forecast: Ewma | Trend, rates: np.ndarray, ahead: int) -> tuple[float, float]:
    """(mean rate short of what came, mean rate planned for nothing) when planning `ahead` intervals at a time."""
    short = spare = 0.0
    rng = np.random.default_rng(4)
    for start in range(0, len(rates) - ahead, ahead):
        for rate in rates[start : start + ahead]:
            forecast.observe(float(rng.poisson(rate * 0.5)) * 2)
        coming = rates[start + ahead : start + 2 * ahead]
        planned = forecast.forecast(ahead)
        short += float(np.maximum(0, coming - planned).sum())
        spare += float(np.maximum(0, planned - coming).sum())
    return short / len(rates), spare / len(rates)


def test_the_trend_is_short_less_on_a_ramp() -> None:
    """A rate that climbs to 13 times its size in 200 s, in half-second counts: 20 s ahead."""
    old, new = (shortfall(f, np.linspace(300.0, 4000.0, 400), 40) for f in (Ewma(), Trend()))
    assert new[0] < 0.2 * old[0]


def test_the_trend_wastes_less_on_a_steady_rate() -> None:
    old, new = (shortfall(f, np.full(400, 1000.0), 40) for f in (Ewma(), Trend()))
    assert new[1] < 0.5 * old[1]
    assert new[0] < 0.01 * 1000.0


def test_up_at_once_down_with_patience() -> None:
    scaler = Autoscaler(least=1, most=8, patience=3)
    held, seen = 2, []
    for wish in (2, 5, 3, 3, 5, 3, 2, 3, None, 1):
        held = scaler.decide(held, lambda wish=wish: wish)
        seen.append(held)
    # The count rises to 5 at once. The two values 3 do not lower it, because a 5 follows. The values 3, 2, 3 lower it
    # to 3, the largest of them. None asks for all GPUs.
    assert seen == [2, 5, 5, 5, 5, 5, 5, 3, 8, 8]


def test_a_small_wish_is_no_reason_to_shrink() -> None:
    scaler = Autoscaler(most=100, patience=1, margin=0.1)
    assert scaler.decide(50, lambda: 46) == 50
    assert scaler.decide(50, lambda: 44) == 44


@given(
    wishes=st.lists(st.one_of(st.none(), st.integers(0, 30)), max_size=40), patience=st.integers(1, 5),
    least=st.integers(1, 3), most=st.integers(4, 20),
)  # fmt: skip
def test_bounds_and_enough(wishes: list[int | None], patience: int, least: int, most: int) -> None:
    scaler = Autoscaler(least=least, most=most, patience=patience)
    held = least
    for wish in wishes:
        held = scaler.decide(held, lambda wish=wish: wish)
        assert least <= held <= most
        assert held >= (most if wish is None else min(most, wish))
