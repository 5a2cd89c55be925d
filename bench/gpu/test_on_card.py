"""Tests on a real GPU with the tests' small agent: the shim loads in every kind of program, counts launches, enforces
limits."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
]


@pytest.fixture(scope="module")
def loading() -> Any:
    import loading

    return loading


def test_every_kind_of_program_runs_and_is_seen(loading: Any, tmp_path: Path) -> None:
    """PyTorch eager and graphs, JAX, CuPy, Triton, Numba, cudart static and shared: results are correct, launches are
    counted."""
    found = loading.coverage(tmp_path)
    for name, row in found.items():
        if "ModuleNotFoundError" in row.get("stderr", ""):
            continue
        assert row["ok"], (name, row)
        if name != "nvml":
            assert row["seen"][0]["launches"] > 0, (name, row)
            assert row["seen"][0]["warnings"] == []


def test_cap_holds_for_every_allocator(loading: Any, tmp_path: Path) -> None:
    """With a limit of 4 GiB, PyTorch's allocator, expandable segments and cudaMallocAsync are refused memory beyond
    it."""
    found = loading.memory(tmp_path)
    for name, family in (("default", 1), ("expandable", 5), ("cudaMallocAsync", 4)):
        row = found[name]
        assert row["ok"], (name, row)
        assert row["total_mib"] == 4096
        assert row["taken_mib"] <= 4096 - 600
        assert family in row["families"]
    assert found["nvml"]["nvml_total_mib"] == found["nvml"]["cuda_total_mib"] == 4096
    assert found["nvml"]["nvml_free_mib"] == found["nvml"]["cuda_free_mib"]


def test_two_tenants_lose_little_to_turns(loading: Any, tmp_path: Path) -> None:
    """8192^3 bf16 products in turns of 100 ms: together at least 97 % of one alone, and each turn ends within 5 ms of
    its deadline."""
    solo = loading.products_rate(tmp_path, 1, None, 4)["rates"][0]
    both = loading.products_rate(tmp_path, 2, 100, 6)
    assert sum(both["rates"]) >= 0.97 * solo
    assert both["overuse_ms_max"] < 5
