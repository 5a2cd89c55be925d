"""The whole comparison with real processes on the software GPU: its ranking is the card's."""

from __future__ import annotations

import pytest

from cotenant.bench.colocation import Plan, Series, measure, parse_ls, parse_schemes, summary


def test_blocks_in_which_the_host_paused_are_told_apart() -> None:
    series = Series()
    calm, paused = [0.0, 0.1, 0.0], [0.0, 3.0, 0.0]
    for alone_ms, beside_ms, late in (
        ([1.0, 1.0, 2.0], [1.0, 1.1, 2.2], calm),
        ([1.0, 1.0, 2.0], [1.0, 4.0, 5.0], paused),
    ):
        alone = {"latency_ms": alone_ms, "late_ms": calm, "active_s": 0.1}
        series.add(alone, 100.0, {"latency_ms": beside_ms, "late_ms": late, "active_s": 0.1}, 80.0, 1.0)
    row = summary(series)
    assert row["late_requests"] == [0, 1]
    assert (row["requests"], row["calm_requests"]) == (6, 3)
    assert row["ls_p99_over_alone_calm"] == pytest.approx((1.1 + 0.98 * 1.1) / (1.0 + 0.98 * 1.0))
    assert row["ls_p99_over_alone"] > 2
    assert row["be_over_left"] == pytest.approx(80 / 100 / 0.9)


@pytest.mark.slow
def test_the_software_gpu_ranks_schemes_as_a_card_does() -> None:
    """By medians, which a busy machine moves least: static parts cost LS its SMs, concurrency its place."""
    plan = Plan(parse_ls("resnet50:4:100"), ["mm4096"], parse_schemes("mps-plus,static,tidal"), rounds=2, block_s=0.6)
    result = measure("soft", plan)
    assert result["backend"] == "driver"
    p50 = {name: rows["mm4096"]["ls_p50_over_alone"] for name, rows in result["schemes"].items()}
    assert p50["tidal"] < p50["static"] < p50["mps-plus"]
    assert p50["tidal"] < 1.4
    for rows in result["schemes"].values():
        row = rows["mm4096"]
        assert row["requests"] > 60
        assert 0.19 < row["be_kernel_ms"] < 0.3
        assert 0.05 < row["ls_active"] < 0.4
