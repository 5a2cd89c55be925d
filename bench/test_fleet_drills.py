"""Seeded drills of the fleet: most in virtual time, some over machines in network namespaces (root, /dev/net/tun).

    COTENANT_DRILLS=200 .venv/bin/python -m pytest -q -s bench/test_fleet_drills.py

COTENANT_DRILLS: how many in all, a fifth of them over real processes (default 10). A seed that fails is
printed with its faults.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import fleet_setting
import machine_drill
import pytest
from netlab import Lab

DRILLS = int(os.environ.get("COTENANT_DRILLS", "10"))
REAL = DRILLS // 5


@pytest.mark.timeout(7200)
def test_in_virtual_time(tmp_path: Path) -> None:
    began = time.monotonic()
    for seed in range(DRILLS - REAL):
        (tmp_path / str(seed)).mkdir()
        try:
            fleet_setting.drill(tmp_path / str(seed), seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    print(f"\n{DRILLS - REAL} drills in virtual time held, in {time.monotonic() - began:.0f} s")


@pytest.mark.timeout(7200)
def test_over_machines(tmp_path: Path) -> None:
    lab = Lab(("c0", "c1", "db", *machine_drill.NODES))
    try:
        for seed in range(REAL):
            began = time.monotonic()
            faults = machine_drill.run(lab, tmp_path / str(seed), seed)
            print(f"\nseed {seed}: {time.monotonic() - began:.1f} s: {', '.join(faults)}", end="", flush=True)
    finally:
        lab.end()
