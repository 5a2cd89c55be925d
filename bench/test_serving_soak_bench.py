"""Runs half an hour of load on a server whose rates change, whose models are loaded and unloaded, and which replans all
the time.

pytest -q -s bench/test_serving_soak_bench.py          (COTENANT_SOAK_S=1800 seconds, COTENANT_SOAK_SCALE=1)
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from serving_soak import check, soak

SECONDS = float(os.environ.get("COTENANT_SOAK_S", "1800"))
SCALE = float(os.environ.get("COTENANT_SOAK_SCALE", "1"))


@pytest.mark.timeout(SECONDS + 300)
def test_half_an_hour_loses_nothing(tmp_path: Path) -> None:
    found = soak(tmp_path, SECONDS, scale=SCALE)
    content = found.result.summary()
    print(
        json.dumps(
            {
                "seconds": SECONDS,
                "requests": content["requests"],
                "services": content["services"],
                "lateness_ms": content["lateness_ms"],
                "replans": found.status["replans"],
                "switches": found.status["switches"],
                "reloads": found.reloads,
                "memory_mb": [round(b / 1e6, 1) for _, b in found.memory[:: max(1, len(found.memory) // 20)]],
                "memory_growth": found.growth(),
                "failures": content["failures"],
            },
            indent=1,
        )
    )
    check(found)
