"""Kills programs, the agent and clients behind the language models' endpoint at random for twenty minutes.

pytest -q -s bench/test_models_soak_bench.py          (COTENANT_SOAK_S=1200 seconds, COTENANT_SOAK_SEED=1,
                                                       COTENANT_SOAK_MECHANISM=auto, time or slices)
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from models_soak import check, soak

SECONDS = float(os.environ.get("COTENANT_SOAK_S", "1200"))
MECHANISM = os.environ.get("COTENANT_SOAK_MECHANISM", "auto")
SEED = int(os.environ.get("COTENANT_SOAK_SEED", "1"))


@pytest.mark.timeout(SECONDS + 900)
def test_twenty_minutes_lose_nothing(tmp_path: Path) -> None:
    found = soak(tmp_path, SECONDS, soft=True, mechanism=MECHANISM, seed=SEED)
    content = {
        "seconds": SECONDS, "seed": SEED, "counts": found.counts, "kills": found.kills,
        "sentences": found.sentences.most_common(20),
        "switches": {row["name"]: row["switches"] for row in found.status["models"]},
        "files": [found.files_before, found.files_after],
        "memory_mb": [round(x, 1) for x in found.memory_mb[:: max(1, len(found.memory_mb) // 20)]],
    }  # fmt: skip
    print(json.dumps(content, indent=1))
    check(found)
