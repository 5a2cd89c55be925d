"""What a launch costs a lone tenant, counted in instructions."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_agent import FakeAgent

from conftest import Tenants

LIMIT = 60


def instructions(tenants: Tenants, broker: FakeAgent | None, launches: int, folder: Path) -> int:
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out.{launches}", str(tenants.client)]
    extra = {"CLIENT_KERNEL_NS": "1"} | ({} if broker else {"CLIENT_LIBRARY": str(tenants.driver)})
    process = tenants.start(broker, [*command, "v2", "launches", str(launches)], **extra)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    found = re.search(r"Collected : (\d+)", err)
    assert found is not None, err
    return int(found.group(1))


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_extra_instructions_per_launch(tenants: Tenants, agent: Callable[..., FakeAgent], tmp_path: Path) -> None:
    """All instructions of the process, fences included: (6000 launches - 2000 launches) / 4000, tenant less native."""
    native = (instructions(tenants, None, 6000, tmp_path) - instructions(tenants, None, 2000, tmp_path)) / 4000
    with agent() as broker:
        tenant = (instructions(tenants, broker, 6000, tmp_path) - instructions(tenants, broker, 2000, tmp_path)) / 4000
    print(f"native {native:.1f}, tenant {tenant:.1f}, extra {tenant - native:.1f} instructions a launch")
    assert tenant - native <= LIMIT
