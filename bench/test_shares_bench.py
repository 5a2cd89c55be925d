"""Shares of GPU time that busy tenants get under the agent, on the software GPU."""

from __future__ import annotations

import pytest

from cotenant.bench.shares import measure


@pytest.mark.parametrize(
    ("requests", "limits", "granted"),
    [
        ([0.0], [0.25], [0.25]),
        ([0.0], [0.5], [0.5]),
        ([0.3, 0.7], [1.0, 1.0], [0.3, 0.7]),
        ([0.2, 0.3, 0.5], [1.0, 1.0, 1.0], [0.2, 0.3, 0.5]),
    ],
)
def test_each_tenant_gets_what_it_was_granted(requests: list[float], limits: list[float], granted: list[float]) -> None:
    result = measure(requests, limits, 3.0, kernel_ms=5.0, work_in_flight_ms=20.0, quota_ms=100.0, solo_block_s=0.25)
    print(f"granted {granted}, got {result['got']}")
    assert result["granted"] == pytest.approx(granted)
    # the tolerance is a percentage point and the length of a turn, 100 ms of 3 s
    assert result["got"] == pytest.approx(granted, abs=0.045)
