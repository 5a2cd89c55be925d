"""Compares the simulator with the real server: the same plan and load, live and in virtual time.

pytest -q -s bench/test_serving_fidelity_bench.py          (COTENANT_FIDELITY_S=60 seconds)
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from onnx_models import dense_model

from cotenant.cli.main import main
from cotenant.loadgen.experiment import read_experiment, run_experiment

SECONDS = float(os.environ.get("COTENANT_FIDELITY_S", "60"))
TIMED: dict[str, Any] = {
    "gpus": {"count": 3, "model": "RTX2080Ti"},
    "backend": "timed",
    "services": [
        {"name": "vgg16", "rate_rps": 60, "slo_ms": 300},
        {"name": "densenet161", "rate_rps": 40, "slo_ms": 400},
        {"name": "ssd-mobilenetv1", "rate_rps": 40, "slo_ms": 400},
        {"name": "mnasnet1_0", "rate_rps": 60, "slo_ms": 200},
    ],
}


def experiment(folder: Path, services: dict[str, Any], seconds: float, seed: int) -> dict[str, Any]:
    path = folder / f"experiment-{seed}.yaml"
    path.write_text(
        yaml.safe_dump({"title": "fidelity", "services": services, "duration": f"{seconds:g}s", "seed": seed})
    )
    return run_experiment(read_experiment(str(path), {}), folder / f"out-{seed}").summary()


def ratios(summary: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        name: {p: round(row[p], 3) for p in ("p50_ms", "p99_ms")}
        for name, row in summary["live_over_simulated"].items()
    }


@pytest.mark.timeout(600)
def test_timed_models_take_what_the_simulator_says(tmp_path: Path) -> None:
    found = experiment(tmp_path, TIMED, SECONDS, 0)
    apart = ratios(found)
    print(json.dumps({"live over simulated": apart, "lateness_ms": found["lateness_ms"], "rps": found["total"]["rps"]}))
    for name, row in apart.items():
        assert abs(row["p50_ms"] - 1) <= 0.15, (name, row)
        assert abs(row["p99_ms"] - 1) <= 0.15, (name, row)


@pytest.mark.timeout(900)
def test_onnx_models_take_what_the_simulator_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """p50 within 15 %; p99 within the spread of five repeats."""
    dense_model(tmp_path / "models" / "dense", layers=72)
    profile = tmp_path / "here.json"
    monkeypatch.setattr("sys.argv", [
        "cotenant", "profile", "service", str(tmp_path / "models" / "dense"), "--out", str(profile), "--batches",
        "1,2,4,8", "--seconds", "1s", "--partitions", "50%,100%", "--margin", "1", "--json",
    ])  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    took = json.loads(profile.read_text())["models"]["dense"]["latency_ms"]["50%"]["1"]
    services = {
        "gpus": {"count": 1, "model": "CPU"},
        "mechanism": "cores",
        "partitions": ["50%"],
        "profile": str(profile),
        "services": [
            {"name": "dense", "model": "models/dense", "rate_rps": round(300 / took, 1), "slo_ms": round(took * 20)}
        ],
    }
    runs = [experiment(tmp_path, services, SECONDS / 3, seed) for seed in range(5)]
    print(json.dumps({"ms alone": took, "live over simulated": [ratios(r)["dense"] for r in runs]}))
    p50 = [r["live_over_simulated"]["dense"]["p50_ms"] for r in runs]
    live = np.array([r["services"]["dense"]["p99_ms"] for r in runs])
    simulated = [r["simulated"]["dense"]["p99_ms"] for r in runs]
    assert abs(float(np.median(p50)) - 1) <= 0.15
    assert live.min() * 0.85 <= float(np.median(simulated)) <= live.max() * 1.15
