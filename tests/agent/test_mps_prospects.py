"""What MPS would enforce on a machine, from what is found there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cotenant.agent.mechanisms.mps_control import Abilities
from cotenant.agent.mechanisms.mps_prospects import EXCLUSIVE, MpsHere, find_mps, foreign_daemons, mps_prospects
from cotenant.core.strength import Promise, Strength
from cotenant.devices.base import Gpu

SOFT = Gpu("GPU-00000000-2222-3333-4444-555555555555", "soft", 8 << 30, 0, kind="soft")


@pytest.mark.parametrize(
    ("can", "sms", "faults"),
    [
        (Abilities(0), Strength.NOTHING, Strength.NOTHING),
        (Abilities(2), Strength.SHIM, Strength.NOTHING),
        (Abilities(3), Strength.SERVER, Strength.SERVER),
    ],
)
def test_strength_follows_the_protocol(can: Abilities, sms: Strength, faults: Strength) -> None:
    first, second = mps_prospects(MpsHere(can, EXCLUSIVE))
    assert (first.promise, first.by, second.promise, second.by) == (Promise.SMS, sms, Promise.FAULTS, faults)


def test_what_stands_in_the_way_is_said() -> None:
    assert mps_prospects(MpsHere(Abilities(3), EXCLUSIVE))[0].obstacles == ()
    (open_door,) = mps_prospects(MpsHere(Abilities(3), "default"))[0].obstacles
    assert open_door.startswith("the GPU's compute mode is default: a program that leaves MPS has the whole GPU")
    found = MpsHere(Abilities(2), "", ("process 7 with pipes in /run/nvidia-mps",))
    older, other, _ = mps_prospects(found)[0].obstacles
    assert "release 615" in older
    assert other.startswith("another MPS daemon runs here (process 7 with pipes in /run/nvidia-mps)")


def test_daemons_of_others_are_found_by_their_pipes(tmp_path: Path) -> None:
    def process(pid: int, command: list[str], pipe: str) -> None:
        folder = tmp_path / "proc" / str(pid)
        folder.mkdir(parents=True)
        (folder / "cmdline").write_text("\0".join([*command, ""]))
        (folder / "environ").write_text(f"HOME=/root\0{pipe}\0")

    daemon = ["/usr/bin/nvidia-cuda-mps-control", "-d"]
    process(7, daemon, "CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps")
    process(8, daemon, "CUDA_MPS_PIPE_DIRECTORY=/run/cotenant/mps/pipe")
    process(9, daemon, "")
    process(12, daemon, "CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps")  # a child of process 7, so not another daemon
    process(10, ["nvidia-cuda-mps-control", "server", "list"], "")
    process(11, ["vim", "nvidia-cuda-mps-control.md"], "")
    (tmp_path / "proc" / "uptime").touch()
    found = foreign_daemons(Path("/run/cotenant"), tmp_path / "proc")
    assert found == ("process 7 with pipes in /run/nvidia-mps", "process 9 with pipes in the daemon's default folder")
    assert str(os.getpid()) not in str(foreign_daemons(tmp_path))


def test_the_software_gpu_has_no_mps(tmp_path: Path) -> None:
    found = find_mps(SOFT, tmp_path)
    assert (found.can, found.foreign) == (Abilities(0), ())
    assert "python -m cotenant.softgpu.mps" in mps_prospects(found)[0].obstacles[0], "it names its stand-in"
    assert "install the version that belongs" in mps_prospects(MpsHere(Abilities(0)))[0].obstacles[0]
