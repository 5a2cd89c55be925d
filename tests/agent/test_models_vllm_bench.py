"""bench/gpu/models_vllm.py without a GPU: its steps on the software GPU and with a stand-in for the sleep mode."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def started(folder: Path, steps: str, seconds: float) -> subprocess.Popen[str]:
    """The script on the software GPU, which writes out.jsonl in this folder."""
    search = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "helpers")])
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "soft", "PYTHONPATH": search, "TMPDIR": str(folder)}
    script = str(ROOT / "bench" / "gpu" / "models_vllm.py")
    command = [sys.executable, script, str(folder / "out.jsonl"), steps, str(seconds)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def test_each_step_writes_its_rows(short_folder: Path) -> None:
    with started(short_folder, "sleep1,sleep2,switch", 120) as running:
        _, errors = running.communicate(timeout=150)
    assert running.returncode == 0, errors
    rows = rows_of(short_folder)
    assert not [row for row in rows if "fault" in row]
    for step, count in (("sleep1", 3), ("sleep2", 3), ("switch", 8)):
        found = [row["identical"] for row in rows if row["step"] == step and "round" in row]
        assert found == [True] * count


def test_steps_without_time_for_a_start_are_left_out(short_folder: Path) -> None:
    with started(short_folder, "sleep1,switch", 3) as running:
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 0, errors
    rows = rows_of(short_folder)
    assert [row["step"] for row in rows] == ["sleep1", "switch"]
    assert all("too few to start" in row["fault"] for row in rows)


def test_a_signal_ends_the_script_and_its_engine_without_a_traceback(short_folder: Path) -> None:
    steps = 20
    with started(short_folder, ",".join(["sleep1"] * steps), 1000) as running:
        assert running.stdout is not None
        assert "card_gib_awake" in json.loads(running.stdout.readline())
        running.terminate()
        _, errors = running.communicate(timeout=60)
    assert (running.returncode, errors) == (1, "ended by a signal\n")
    assert len(rows_of(short_folder)) < 4 * steps


def test_an_interrupted_end_kills_what_ignores_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "gpu"))
    end = importlib.import_module("models_pair").end
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()

        def interrupted(timeout: float | None = None) -> int:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(process, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                end(process, group=True)
        assert process.wait(20) == -signal.SIGKILL


def test_alone_and_time_share_their_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "gpu"))
    joined = importlib.import_module("models_vllm").joined
    assert joined(["alone", "cotenant", "mps", "time"]) == ["alone+time", "cotenant", "mps"]
    assert joined(["alone", "mps"]) == ["alone", "mps"]
