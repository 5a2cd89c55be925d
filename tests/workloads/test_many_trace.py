"""The requests of bench/gpu/models_many.py: reproducible, with the stated rates and times without requests."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

NAMES = tuple(f"model-{k + 1}" for k in range(8))
LONG_S = 40_000.0


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench" / "gpu"))
    return importlib.import_module("many_trace")


def test_two_draws_are_equal_and_in_order(trace: Any) -> None:
    found = trace.draw(NAMES, 600.0, trace.Kind())
    assert found == trace.draw(NAMES, 600.0, trace.Kind())
    assert [r.at_s for r in found] == sorted(r.at_s for r in found)
    assert {r.model for r in found} == set(NAMES)
    assert max(r.prompt for r in found) <= 2048


def test_rates_lengths_and_pauses_are_as_stated(trace: Any) -> None:
    found = trace.draw(NAMES, LONG_S, trace.Kind())
    part = 8.0 / 38.0
    for k, name in enumerate(NAMES):
        count = sum(r.model == name for r in found)
        assert count / LONG_S == pytest.approx(4.0 * (k + 1) ** -0.8 * part, rel=0.12)
    assert sum(r.output for r in found) / len(found) == pytest.approx(64, rel=0.05)
    spans = trace.bursts(found, NAMES[0])
    # pauses of up to 5 s join bursts, and a burst ends with its last request
    assert sum(b - a for a, b in spans) / LONG_S == pytest.approx(part, rel=0.15)


def test_bursts_overlaps_and_short_pauses(trace: Any) -> None:
    requests = [trace.Request(at, "a", 1, 1) for at in (1.0, 4.0, 9.0, 20.0, 21.0)]
    assert trace.bursts(requests, "a") == [(1.0, 9.0), (20.0, 21.0)]
    assert trace.bursts(requests, "b") == []
    assert [r.at_s for r in trace.shortened(requests)] == [1.0, 3.0, 5.0, 7.0, 8.0]
    assert trace.together([(0.0, 4.0), (4.0, 6.0), (5.0, 7.0)], 10.0) == (2, 0.8)
    assert trace.together([], 10.0) == (0, 0.0)
