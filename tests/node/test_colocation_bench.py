"""The whole comparison with real processes on the software GPU: its ranking is the card's."""

from __future__ import annotations

import pytest

from cotenant.bench.colocation import Plan, measure, parse_ls, parse_schemes


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
