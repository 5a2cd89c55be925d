"""`cotenant doctor` on machines of several kinds: what holds, what stands in the way, and the exit code."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from command import cotenant

from cotenant.agent.mechanisms.mps_control import Abilities
from cotenant.agent.mechanisms.mps_prospects import EXCLUSIVE, MpsHere
from cotenant.agent.mechanisms.prospects import Found, strongest, under
from cotenant.cli import doctor
from cotenant.core.strength import Promise, Prospect, Strength
from cotenant.policy.memory_limits import Detected, GroupLimit, prospect
from cotenant.softgpu import mps as mps_standin
from cotenant.softgpu.cgroups import FolderCgroups

KERNEL = prospect(Detected("615.71.09", call=True, cgroup=2, dmem=True, root=True))
H100_580 = Found(prospect(Detected("580.126.20", cgroup=2, root=True)), MpsHere(Abilities(2), "default"))
BEST = Found(KERNEL, MpsHere(Abilities(3), EXCLUSIVE), copies=True)


def keeps(found: Found) -> dict[Promise, tuple[str, Strength]]:
    return {each.promise: (name, each.by) for name, each in strongest(found)}


def test_driver_580_keeps_time_by_hardware_and_memory_by_the_shim() -> None:
    assert keeps(H100_580) == {
        Promise.TIME: ("slices", Strength.HARDWARE),
        Promise.SMS: ("mps", Strength.SHIM),
        Promise.MEMORY: ("time", Strength.SHIM),
        Promise.BANDWIDTH: ("time", Strength.NOTHING),
        # each tenant has its own context, so a fault does not end an MPS server that all share
        Promise.FAULTS: ("time", Strength.DRIVER),
    }
    (memory,) = (each for _, each in strongest(H100_580) if each.promise is Promise.MEMORY)
    assert memory.obstacles == (
        "driver 580.126.20 has no memory limits, which need release 615: install that release or a newer one",
    )


def test_driver_615_keeps_sms_by_the_server_and_memory_by_the_kernel() -> None:
    assert keeps(BEST) == {
        Promise.TIME: ("slices", Strength.HARDWARE),
        Promise.SMS: ("mps", Strength.SERVER),
        Promise.MEMORY: ("time", Strength.KERNEL),
        Promise.BANDWIDTH: ("time", Strength.SHIM),
        Promise.FAULTS: ("time", Strength.DRIVER),
    }
    assert under("mps", BEST)[4].by is Strength.SERVER


def test_turns_stand_in_where_the_driver_takes_no_slices() -> None:
    found = Found(KERNEL, MpsHere(Abilities(0)), slices="release 999 is not known")
    rows: dict[Promise, tuple[str, Prospect]] = {each.promise: (name, each) for name, each in strongest(found)}
    name, time = rows[Promise.TIME]
    assert (name, time.by) == ("time", Strength.SHIM)
    assert "release 999 is not known" in time.obstacles[0]
    assert "nvidia-cuda-mps-control is not installed" in rows[Promise.SMS][1].obstacles[0]


def examine(*args: object) -> tuple[int, dict[str, Any]]:
    result = cotenant("doctor", "--json", *args)
    return result.code, json.loads(result.out)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A software GPU whose driver is of release 615, with MPS and the kernel's controller."""
    monkeypatch.setenv("COTENANT_SOFTGPU_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("COTENANT_SOFTGPU_CGROUPS", str(tmp_path / "cgroup"))
    monkeypatch.setenv("COTENANT_SOFTGPU_MPS", str(mps_standin.install(tmp_path)))
    monkeypatch.setenv("MPS_STANDIN_RELEASE", "615")
    FolderCgroups.make(tmp_path / "cgroup", dmem=True, memory_bytes=16 << 30)
    return tmp_path


def test_without_an_agent_it_looks_itself_and_says_how_to_start_one(machine: Path) -> None:
    code, found = examine("--gpus", "soft", "--dir", machine / "none")
    assert (code, found["agent"]) == (1, None)
    assert ["start one with cotenant agent" in text for text in found["problems"]] == [True]
    (gpu,) = found["gpus"]
    by = {row["promise"]: row["by"] for row in gpu["prospects"]}
    assert by == {"time": "hardware", "sms": "server", "memory": "kernel", "bandwidth": "nothing", "faults": "driver"}
    assert list((machine / "cgroup").glob("cotenant-*")) == []  # the trial removes its control group


def test_of_the_software_gpu_it_names_the_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTENANT_SOFTGPU_STATE", str(tmp_path / "state"))
    for variable in ("COTENANT_SOFTGPU_CGROUPS", "COTENANT_SOFTGPU_MPS"):
        monkeypatch.delenv(variable, raising=False)
    (gpu,) = examine("--gpus", "soft", "--dir", tmp_path / "none")[1]["gpus"]
    obstacles = {row["promise"]: " ".join(row["obstacles"]) for row in gpu["prospects"]}
    assert "python -m cotenant.softgpu.mps" in obstacles["sms"]
    assert "python -m cotenant.softgpu.cgroups" in obstacles["memory"]


def test_without_a_gpu_it_names_the_software_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cotenant.devices.nvidia import Nvidia

    monkeypatch.setattr(Nvidia, "gpus", lambda self: ())
    result = cotenant("doctor", "--dir", tmp_path)
    assert result.code == 1
    assert "problem: no NVIDIA GPU was found; --gpus soft starts the software GPU instead\n" in result.out


class Answering:
    """A connection to an agent that has the GPU of BEST or of driver 580."""

    found = H100_580

    def __init__(self, folder: Path) -> None: ...

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *error: object) -> None: ...

    def call(self, op: str) -> dict[str, Any]:
        from cotenant.agent.mechanisms.prospects import row_of

        assert op == "mechanisms"
        rows = [row_of(*each) for each in strongest(self.found)]
        return {"gpus": [{"uuid": "GPU-1", "index": 3, "name": "H100", "prospects": rows}]}


def test_the_exit_code_says_whether_what_is_asked_for_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.agent.ipc.client.ControlClient", Answering)
    assert examine("--dir", tmp_path)[0] == 0
    assert examine("--dir", tmp_path, "--enforce", "memory=shim", "--enforce", "time=hardware")[0] == 0
    code, found = examine("--dir", tmp_path, "--enforce", "memory=driver")
    assert (code, found["agent"]) == (1, str(tmp_path))
    (problem,) = found["problems"]
    assert problem.startswith("GPU 3: memory is enforced by shim, not by driver as demanded: ")
    assert "which need release 615" in problem
    monkeypatch.setattr(Answering, "found", BEST)
    # the kernel could enforce the limit, too, and is stronger
    assert examine("--dir", tmp_path, "--enforce", "memory=driver")[0] == 0
    shown = cotenant("doctor", "--dir", tmp_path).out
    assert "memory    kernel" in shown
    assert "no problem was found" in shown


def test_what_could_not_be_stronger_names_no_obstacle() -> None:
    """A partition that is missing does not make contexts of their own, which the driver has, any weaker."""
    found = {each.promise: each for _, each in strongest(BEST)}
    assert found[Promise.FAULTS].obstacles == ()


def test_what_is_in_the_way_of_the_strongest_is_not_why_it_is_not_stronger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = (GroupLimit(Path("/user.slice"), 4 << 30),)
    foreign = prospect(Detected("615", call=True, cgroup=2, dmem=True, root=True, foreign=others))
    monkeypatch.setattr("cotenant.agent.ipc.client.ControlClient", Answering)
    monkeypatch.setattr(Answering, "found", Found(foreign, MpsHere(Abilities(0))))
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = cotenant("doctor", "--dir", tmp_path).out.splitlines()
    after = lines[next(index for index, line in enumerate(lines) if line.startswith("  memory")) + 1]
    assert after.strip().startswith("in the way: another program limits GPU memory of a control group: /user.slice")


def test_ps_and_doctor_wrap_below_the_text_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotenant.agent.ipc.client.ControlClient", Answering)
    monkeypatch.delenv("COLUMNS", raising=False)
    piped = cotenant("doctor", "--dir", tmp_path).out.splitlines()
    assert len([line for line in piped if line.startswith("  memory")]) == 1
    assert max(map(len, piped)) > 120, "a file gets whole lines"
    monkeypatch.setenv("COLUMNS", "80")
    shown = cotenant("doctor", "--dir", tmp_path).out.splitlines()
    assert max(map(len, shown[1:])) <= 80
    first = next(index for index, line in enumerate(shown) if line.startswith("  time"))
    assert shown[first + 1].startswith(" " * 22), "below the text"


@pytest.mark.parametrize("text", ["memory", "memory=strong", "luck=driver", "memory=nothing"])
def test_a_demand_with_a_slip_is_named(text: str) -> None:
    result = cotenant("doctor", "--enforce", text)
    assert result.code == 2
    assert doctor.DEMAND in result.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root reaches every folder")
def test_a_folder_that_is_not_open_is_named(tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0)
    assert "may not connect" in str(examine("--dir", tmp_path / "shut")[1]["problems"])
