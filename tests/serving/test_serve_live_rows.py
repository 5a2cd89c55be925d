"""What the live page says that gpulets got."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cotenant.serving.dispatch.lets import Let
from cotenant.serving.gateway.live_rows import Got


def gpulet(percent: float) -> Any:
    return Let(SimpleNamespace(percent=percent, seats=[]), None)  # type: ignore[arg-type]


def test_a_gpulet_got_what_it_was_busy_for_of_the_window() -> None:
    """A gpulet of 40 % that computes for 1 s of the 4 s between two looks got 10 % of its GPU."""
    got, let = Got(), gpulet(40)
    assert got.share(let, 1000.0) is None
    let.busy_ms = 1000.0
    assert got.share(let, 5000.0) == 0.1


def test_the_batch_that_runs_counts() -> None:
    got, let = Got(), gpulet(100)
    got.share(let, 0.0)
    let.job, let.started_ms = object(), 500.0  # type: ignore[assignment]
    assert got.share(let, 1000.0) == 0.5


def test_what_is_older_than_the_window_is_forgotten() -> None:
    got, let = Got(), gpulet(100)
    got.share(let, 0.0)
    let.busy_ms = 8000.0
    assert got.share(let, 8000.0) == 1.0
    assert got.share(let, 16000.0) == 0.0  # the window starts at 8 s, so the observation at 0 s is outside it
    assert got.share(let, 60000.0) is None  # no observation for a long time, as at the first one
