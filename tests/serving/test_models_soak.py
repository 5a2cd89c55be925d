"""Some seconds of what bench/test_models_soak_bench.py does for twenty minutes."""

from __future__ import annotations

from pathlib import Path

import pytest
from models_soak import check, soak


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mechanism", ["", "time", "slices"], ids=["programs", "turns", "slices"])
def test_nothing_is_lost_wrong_or_left(tmp_path: Path, mechanism: str) -> None:
    found = soak(tmp_path, 15.0, soft=bool(mechanism), mechanism=mechanism, kill_every_s=2.0)
    check(found)
    assert found.kills["program"] > 0
