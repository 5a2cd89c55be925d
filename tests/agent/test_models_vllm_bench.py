"""bench/gpu/models_vllm.py without a GPU: its steps on the software GPU and with a stand-in for the sleep mode."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_each_step_writes_its_rows(short_folder: Path) -> None:
    out = short_folder / "out.jsonl"
    search = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "helpers")])
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "soft", "PYTHONPATH": search, "TMPDIR": str(short_folder)}
    command = [sys.executable, str(ROOT / "bench" / "gpu" / "models_vllm.py"), str(out), "sleep1,sleep2,switch", "120"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert not [row for row in rows if "fault" in row]
    for step, count in (("sleep1", 3), ("sleep2", 3), ("switch", 8)):
        found = [row["identical"] for row in rows if row["step"] == step and "round" in row]
        assert found == [True] * count


def test_alone_and_time_share_their_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "gpu"))
    joined = importlib.import_module("models_vllm").joined
    assert joined(["alone", "cotenant", "mps", "time"]) == ["alone+time", "cotenant", "mps"]
    assert joined(["alone", "mps"]) == ["alone", "mps"]
