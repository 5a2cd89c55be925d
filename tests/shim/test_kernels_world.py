"""The timing of kernels in programs that make and destroy contexts, in a C program with a driver of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from native_sources import NATIVE, SHIM, compile_c

SOURCE = Path(__file__).parent / "kernels_world.c"
PAIRS = 256


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kernels") / "world"
    compile_c(["-O1", "-g", "-Wall", "-Wno-unused-result", f"-I{NATIVE}", f"-I{SHIM}", "-o", out, SOURCE, "-lpthread"])
    return out


@pytest.mark.parametrize("lives", [3, 50, 10**6])
@pytest.mark.parametrize("seed", range(5))
def test_events_are_used_only_while_they_exist(world: Path, seed: int, lives: int, tmp_path: Path) -> None:
    """The program ends with an error if an event is used that does not exist or belongs to another context."""
    environment = os.environ | {"COTENANT_KERNELS": str(tmp_path / "times")}
    done = subprocess.run(
        [world, str(seed), "5000", str(lives)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    launches, timed, missed, most_alive = map(int, done.stdout.split())
    assert timed + missed == launches
    assert most_alive <= 2 * PAIRS
    if lives == 10**6:
        assert missed == 0, "no context was destroyed with work in flight"
