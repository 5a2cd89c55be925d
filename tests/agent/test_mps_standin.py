"""The stand-in for MPS refuses what the manual says that a daemon refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cotenant.agent.mechanisms.mps_control import Abilities, Control, abilities
from cotenant.softgpu.mps_world import Client, RefusedError, World

GPU = "GPU-a"


def world(*, release: int = 615, uid: int = 1000, multiuser: bool = False) -> World:
    made = World({GPU: 132}, release, uid, multiuser=multiuser)
    made.command(["server", "create", "s"], uid)
    return made


def order(to: World, text: str, uid: int = 1000) -> str:
    return to.command(text.split(), uid)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("server create s", "server 's' already exists"),
        ("server create No-Name", "invalid server name"),
        ("namespace create default --server=s", "already exists"),
        ("namespace delete default --server=s", "cannot be deleted"),
        ("namespace set default --server=s --active-thread-percentage=101", "invalid active thread percentage"),
        ("namespace set default --server=s --pinned-memory-limit=much", "invalid size"),
        ("sm-partition create p --server=s --device=GPU-b --chunks=1", "is not of server"),
        ("sm-partition create p --server=s --device=GPU-a --chunks=17", "17 requested, 16 available"),
        ("server set s --timeslice-pct=50", "unknown option"),
        ("color list", "unknown module"),
    ],
)
def test_commands_that_are_refused(command: str, sentence: str) -> None:
    with pytest.raises(RefusedError, match=sentence):
        order(world(), command)


def test_partitions_are_refused_with_locality_domains_and_with_clients() -> None:
    made = world()
    order(made, "server create apart --locality-domains=true")
    with pytest.raises(RefusedError, match="locality domains"):
        order(made, "sm-partition create p --server=apart --device=GPU-a --chunks=1")
    made.connect(Client(1, 1000, "s", "default", (GPU,), {}, [GPU]))
    with pytest.raises(RefusedError, match="active clients"):
        order(made, "sm-partition create p --server=s --device=GPU-a --chunks=1")


def test_a_daemon_for_one_user_takes_no_other_and_one_for_all_obeys_every_root() -> None:
    other = Client(1, 2000, "s", "default", (GPU,), {})
    assert world().connect(other) == "error 800"
    with pytest.raises(RefusedError, match="permission denied"):
        world().command(["server", "list"], 2000)
    everybodys = world(uid=0, multiuser=True)
    assert everybodys.connect(other) == "ok 132 0"
    order(everybodys, "namespace set default --server=s --active-thread-percentage=100", 0)
    with pytest.raises(RefusedError, match="only --uid=0"):
        order(everybodys, "server create mine --uid=2000", 0)


def test_its_module_writes_the_command_of_a_release(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("MPS_STANDIN_RELEASE", "MPS_STANDIN_GPUS"):
        monkeypatch.delenv(variable, raising=False)
    module = [sys.executable, "-m", "cotenant.softgpu.mps"]
    can = {}
    for release in ("595", "615", "620"):
        made = subprocess.run([*module, short_folder / release, release], capture_output=True, text=True, check=True)
        can[release] = abilities(made.stdout.strip())
    assert can == {"595": Abilities(2), "615": Abilities(3, True), "620": Abilities(3, True, True, True)}
    control = Control(str(short_folder / "615" / "nvidia-cuda-mps-control"), short_folder / "p", short_folder / "l", 3)
    control.start()
    try:
        control.order("server", "create", "s")
        (row,) = control.rows("server", "list")
        assert len(row[5].split()) == 16, "by default the daemon has every device of the software GPU"
    finally:
        control.order("--quit")
    for wrong in ([], [str(short_folder / "x")], [str(short_folder / "x"), "600"]):
        refused = subprocess.run([*module, *wrong], capture_output=True, text=True, check=False)
        assert (refused.returncode, refused.stderr.strip()) == (
            1, "usage: python -m cotenant.softgpu.mps FOLDER 595|615|620"
        )  # fmt: skip
