"""Energy of runs worked out by hand: watts by GPU model and activity, times the seconds that GPUs were held or idle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sample_records import cluster, hand_record

from cotenant.core.events import Kind, Reason
from cotenant.core.gpus import CATALOG
from cotenant.core.metrics.summary import Analysis, summarise
from cotenant.core.power import BOARD_W, MEASURED_W, activity, watts
from cotenant.core.record.record import Record
from cotenant.report.text import metric_text

JOBS: list[dict[str, Any]] = [
    {"id": "a", "arrival_s": 0.0, "gpus": 4.0, "model": "bert"},
    {"id": "b", "arrival_s": 10.0, "gpus": 0.5, "model": "unheard-of"},
]
EVENTS = [
    (0.0, 0, Kind.ARRIVE, Reason.NONE),
    (0.0, 0, Kind.START, Reason.IN_ORDER, 12, 200, 1.0, [(0, 4.0)]),
    (10.0, 1, Kind.ARRIVE, Reason.NONE),
    (10.0, 1, Kind.START, Reason.IN_ORDER, 1, 50, 1.0, [(1, 0.5)]),
    (50.0, 1, Kind.FINISH, Reason.DONE),
    (60.0, 0, Kind.MOVE, Reason.REPLACED, 12, 200, 1.0, [(1, 4.0)]),
    (100.0, 0, Kind.FINISH, Reason.DONE),
]


def record(models: list[str], placements: bool = True) -> Record:
    info = cluster(2, 4) | {"gpu_models": models, "node_models": [0, len(models) - 1]}
    info |= {"gpus_by_model": [8] if len(models) == 1 else [4, 4]}
    return hand_record(JOBS, EVENTS, cluster_info=info, placements=placements)


@pytest.mark.parametrize("placements", [True, False])
def test_one_gpu_model(placements: bool) -> None:
    """An A100-40GB draws 46 W idle and 407 at most: bert 46 + 0.89 x 361 = 367.29 W, others 258.99."""
    got = Analysis(record(["A100-40GB"], placements))
    np.testing.assert_allclose(got.jobs.energy_j, [4 * 100 * 367.29, 0.5 * 40 * 258.99])
    # The cluster has 8 GPUs for 100 s, of which jobs held 400 + 20 GPU-seconds.
    assert got.summary["energy"]["idle_j"] == pytest.approx(46 * (800 - 420))
    assert got.summary["energy"]["total_j"] == pytest.approx(4 * 100 * 367.29 + 20 * 258.99 + 46 * 380)


def test_two_gpu_models() -> None:
    """a is 60 s on A100s and 40 s on T4s (8 to 71 W: bert 8 + 0.89 x 63 = 64.07 W); b on a T4 (45.17 W)."""
    got = summarise(record(["A100-40GB", "T4"]))
    assert got["energy"]["jobs_j"] == pytest.approx(4 * 60 * 367.29 + 4 * 40 * 64.07 + 20 * 45.17)
    assert got["energy"]["idle_j"] == pytest.approx(46 * (400 - 240) + 8 * (400 - 180))


def test_what_is_not_known_is_null() -> None:
    assert summarise(record(["A100-40GB", "T4"], placements=False))["energy"]["total_j"] is None
    assert summarise(record(["GB300"]))["energy_j"]["mean"] is None


def test_the_tables_are_of_the_catalog() -> None:
    assert set(MEASURED_W) | set(BOARD_W) <= set(CATALOG)
    assert not set(MEASURED_W) & set(BOARD_W)
    for gpu in CATALOG:
        known = watts(gpu)
        assert known is None or 0 < known[0] < known[1]
    assert activity("ResNet-50 (batch size 16)") == 0.87
    assert activity("Recommendation (batch size 512)") == 0.01


def test_energy_in_words() -> None:
    assert metric_text(3.6e9, "J") == "1,000 kWh"
    assert metric_text(None, "J") == "–"
