"""What a launch costs a lone tenant, counted in instructions."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_agent import FakeAgent
from shim_tenants import Tenants

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


def test_many_kernels_stay_on_the_hot_path(tenants: Tenants, agent: Callable[..., FakeAgent]) -> None:
    """50 kernels with 3 grids each, 4.5 us on average, 12,000 launches: 54 ms of work, so about 54 fences, and one for
    each kernel when it is new (half as many alone); thousands would mean that keys push each other out."""
    with agent() as broker:
        tenants.output(tenants.client_run(broker, "v2", "many", "50", "12000"))
        client = broker.clients[0]
        assert client.slot().launches == 12000
        assert 20 <= client.slot().fences <= 54 * 1.5 + 2 * 150


def test_launches_of_nothing_get_the_drivers_error(tenants: Tenants, agent: Callable[..., FakeAgent]) -> None:
    """20,000 launches without a function or a grid: an error each, as without the shim, and the process lives."""
    script = (
        "from cuda_calls import *\nstart()\n"
        "no = [None, *[0] * 7, None, None, None]\n"
        "codes = {raw('cuLaunchKernel', *no) for _ in range(20000)}\n"
        "print(len(codes - {0}), raw('cuLaunchKernelEx', None, None, None, None) > 0)\n"
    )
    with agent() as broker:
        assert tenants.output(tenants.python(broker, script)).split() == ["1", "True"]
