"""Somebody dies or hangs beside the others: whoever is left goes on within a second. The steps are the card's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "gpu"))

import colocation_faults as steps

WITHIN_MS = 1000.0


@pytest.fixture(autouse=True)
def software_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "GPU", "soft")
    monkeypatch.setattr(steps, "TOGETHER", False)


def test_ls_is_killed_while_it_holds_the_floor() -> None:
    found = steps.ls_killed()
    assert found["launches_while_held"] == 0
    assert found["be_goes_on_after_ms"] < WITHIN_MS


@pytest.mark.slow
def test_be_is_killed_or_stopped_inside_a_kernel() -> None:
    for how, seen in steps.be_killed().items():
        assert seen["ls_requests"] > 150, how
        assert seen["ls_max_ms"] < WITHIN_MS, how


@pytest.mark.slow
def test_the_agent_is_killed_and_comes_back() -> None:
    """Both sides go on without it (fail open), and are on the floor of the next one."""
    found: dict[str, Any] = steps.agent_restarted()
    assert found["ls_max_ms"] < WITHIN_MS
    assert found["be_longest_gap_ms"] < WITHIN_MS
    (floor,) = found["floor"].values()
    assert floor["best_effort_processes"] == 1
    assert len(floor["holders"]) == 1
    assert floor["holders"][0]["raises"] > 0
