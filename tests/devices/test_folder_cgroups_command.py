"""The command that makes the stand-in for control groups."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MODULE = [sys.executable, "-m", "cotenant.softgpu.cgroups"]


@pytest.mark.parametrize(("kind", "dmem"), [("dmem", True), ("misc", False)])
def test_it_makes_a_tree_of_a_kernel_with_or_without_the_controller(tmp_path: Path, kind: str, dmem: bool) -> None:
    subprocess.run([*MODULE, str(tmp_path / "cg"), kind], check=True)
    assert (tmp_path / "cg" / "dmem.capacity").exists() is dmem
    again = subprocess.run([*MODULE, str(tmp_path / "cg"), kind], capture_output=True, text=True, check=False)
    assert (again.returncode, again.stderr.count("\n")) == (1, 1)
    assert "exists: name a new folder" in again.stderr


@pytest.mark.parametrize("wrong", [[], ["cg"], ["cg", "dmme"]])
def test_wrong_arguments_get_the_usage_and_make_nothing(tmp_path: Path, wrong: list[str]) -> None:
    done = subprocess.run([*MODULE, *wrong], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "usage: python -m cotenant.softgpu.cgroups FOLDER dmem|misc\n")
    assert list(tmp_path.iterdir()) == []
