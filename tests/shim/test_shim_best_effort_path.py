"""What a launch costs a best-effort tenant while the floor is down, counted in instructions."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.gate.client import join_floor
from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.tenants.launcher import Launch, register
from cotenant.bench.colocation_rig import Rig

LIMIT = 600
FEW, MANY = 2000, 6000


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig("soft", together=True) as started:
        # so large that no launch waits, because the program is slow under valgrind
        started.scheme("tidal", in_flight_us=100_000)
        yield started


def instructions(rig: Rig, client: Path, spec: TenantSpec, launches: int, folder: Path) -> int:
    """Of a program with that many launches; the tenant is one of its name and number."""
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out", str(client)]
    command += ["v2", "launches", str(launches)]
    with ControlClient(rig.bench.folder) as control:
        environment = rig.bench.with_shim(register(control, Launch(rig.bench.folder, spec, command)))
        done = subprocess.run(
            command,
            env=environment | {"CLIENT_KERNEL_NS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert found is not None, done.stderr
    return int(found.group(1))


def per_launch(rig: Rig, client: Path, folder: Path, *, best_effort: bool) -> float:
    counts = [
        instructions(
            rig,
            client,
            TenantSpec(f"{'be' if best_effort else 'usual'}-{launches}", mechanism="mps", best_effort=best_effort),
            launches,
            folder,
        )
        for launches in (FEW, MANY)
    ]
    return (counts[1] - counts[0]) / (MANY - FEW)


@pytest.mark.timed
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_a_best_effort_launch_costs_little_more_than_another(rig: Rig, client_program: Path, tmp_path: Path) -> None:
    """A look at the page and sums under a lock, for nearly all: 2,400 instructions when every launch took the whole
    way. Ends of pieces, of which there is one for 64 launches here, and their events are included."""
    floor = join_floor(rig.bench.folder, rig.uuid)
    usual = per_launch(rig, client_program, tmp_path, best_effort=False)
    best_effort = per_launch(rig, client_program, tmp_path, best_effort=True)
    floor.close()
    print(f"a tenant {usual:.0f}, a best-effort one {best_effort - usual:.0f} more")
    assert best_effort - usual <= LIMIT
