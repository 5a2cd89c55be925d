"""Measures the controller with a long queue, 10,000 jobs waiting and 500 running: seconds per decision and memory.

    .venv/bin/python -m pytest -q -s bench/test_fleet_scale.py

Baseline of the same run: the same controller with 100 waiting and 50 running. Jobs are real processes (sleep).
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

MOST_DECISION_S = 1.0
MOST_BYTES = 500 << 20
ROUNDS = 8


def _cotenant(folder: Path, *words: str) -> Any:
    environment = os.environ | {"COTENANT_FLEET": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "cotenant.cli.main", *words, "--json"],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _measure(folder: Path, ordering: str, nodes: int, gpus: int, waiting: int) -> dict[str, Any]:
    running = nodes * gpus
    _cotenant(
        folder, "fleet", "up", "--executor", "local", "--nodes", str(nodes), "--gpus-per-node", str(gpus),
        "--ordering", ordering, "--allotment", "tune", "--lease", "2s",
    )  # fmt: skip
    try:
        began = time.monotonic()
        specs = ["submit", "--count", str(waiting + running), "--name", "sleeper", "--duration", "1h"]
        _submit(folder, specs)
        submitted_s = time.monotonic() - began
        deadline = time.monotonic() + 240
        while _cotenant(folder, "fleet", "status")["jobs"]["running"] < running:
            assert time.monotonic() < deadline, "not all were started"
            time.sleep(1.0)
        started_s = time.monotonic() - began
        time.sleep(2.0 * ROUNDS)
        began = time.monotonic()
        status = _cotenant(folder, "fleet", "status")
        asked_s = time.monotonic() - began
        ticks, cpu = _ticks(status["pid"]), time.monotonic()
        time.sleep(10.0)
        busy = (_ticks(status["pid"]) - ticks) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - cpu)
    finally:
        _cotenant(folder, "fleet", "down", "--within", "1s")
    with sqlite3.connect(folder / "fleet.db") as store:
        rows = store.execute("SELECT decide_s FROM rounds WHERE early=0 ORDER BY time_s DESC LIMIT ?", (ROUNDS,))
        decisions = sorted(row[0] for row in rows)
    assert status["jobs"]["queued"] == waiting
    return {
        "ordering": ordering, "waiting": waiting, "running": running, "decide_median_s": decisions[len(decisions) // 2],
        "decide_most_s": decisions[-1], "memory_mib": status["memory_bytes"] / 2**20, "submit_s": submitted_s,
        "all_started_s": started_s, "status_s": asked_s, "cpu": busy,
    }  # fmt: skip


def _submit(folder: Path, words: list[str]) -> None:
    environment = os.environ | {"COTENANT_FLEET": str(folder)}
    subprocess.run(
        [sys.executable, "-m", "cotenant.cli.main", *words, "--", "sleep", "3600"],
        env=environment, capture_output=True, timeout=300, check=True,
    )  # fmt: skip


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.timeout(900)
def test_ten_thousand_waiting_and_five_hundred_running(tmp_path: Path) -> None:
    rows = [_measure(tmp_path / "small", "srtf", 10, 5, 100), _measure(tmp_path / "large", "srtf", 100, 5, 10_000)]
    print()
    for row in rows:
        print(
            f"{row['ordering']} + tune, {row['waiting']:,} waiting, {row['running']} running: a decision takes "
            f"{row['decide_median_s'] * 1e3:.1f} ms (most {row['decide_most_s'] * 1e3:.1f}), controller "
            f"{row['memory_mib']:.0f} MiB and {row['cpu']:.0%} of a core; submitted in {row['submit_s']:.1f} s, all "
            f"started after {row['all_started_s']:.1f} s, status answers in {row['status_s'] * 1e3:.0f} ms"
        )
    ratio = rows[1]["decide_median_s"] / rows[0]["decide_median_s"]
    print(f"ratio of decisions, 100 times the queue: {ratio:.1f}")
    assert rows[1]["decide_most_s"] < MOST_DECISION_S
    assert rows[1]["memory_mib"] * 2**20 < MOST_BYTES
