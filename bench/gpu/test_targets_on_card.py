"""Targets on a real GPU with the real agent and shim: each check of targets.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import targets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
]


@pytest.mark.parametrize("name", targets.TARGETS)
def test_target_holds(name: str) -> None:
    """Each target is described at its check in targets.py."""
    holds, figures = targets.TARGETS[name]()
    assert all(holds.values()), (holds, figures)
