"""Devices: the list of them, what the software GPU answers, and that no other room loads the driver's libraries."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cotenant.core.errors import InputError, WorkError
from cotenant.devices.base import Gpu, uuid_bytes, uuid_text
from cotenant.devices.nvidia import Nvidia
from cotenant.devices.registry import DEVICES, device_named, discover, within
from cotenant.devices.soft import Soft

SOURCE = Path(__file__).resolve().parents[2] / "src" / "cotenant"
GIB = 1 << 30
ASK = """
import json
from cotenant.devices.registry import device_of, discover
found = discover(["soft"])
answers = [(device_of(gpu).free_bytes(gpu.uuid), device_of(gpu).card(gpu.uuid).part()) for gpu in found]
print(json.dumps({"gpus": [gpu.as_dict() for gpu in found], "answers": answers}))
"""


def test_the_software_gpu_answers_as_a_card_does(tmp_path: Path) -> None:
    """In a process of its own: the state file is read once. What a program may see does not change what is there."""
    environment = os.environ | {
        "COTENANT_SOFTGPU_STATE": str(tmp_path / "state"), "COTENANT_SOFTGPU_COUNT": "2",
        "COTENANT_SOFTGPU_MEMORY": str(3 * GIB), "COTENANT_SOFTGPU_CLOCK": "75", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    assert [(gpu["index"], gpu["memory_bytes"], gpu["kind"]) for gpu in found["gpus"]] == [
        (0, 3 * GIB, "soft"), (1, 3 * GIB, "soft"),
    ]  # fmt: skip
    assert len({gpu["uuid"] for gpu in found["gpus"]}) == 2
    assert found["answers"] == [[3 * GIB, 0.75], [3 * GIB, 0.75]]


def test_devices_are_found_by_word_and_kind() -> None:
    assert isinstance(device_named("soft"), Soft)
    assert all(isinstance(device_named(gpus), Nvidia) for gpus in ("all", "0", "GPU-1234"))
    assert {device.name for device in DEVICES.values()} == set(DEVICES) == {"nvidia", "soft"}
    assert (DEVICES["nvidia"].mps_control(), DEVICES["soft"].mps_control()) == ("nvidia-cuda-mps-control", None)
    assert DEVICES["nvidia"].environment(["GPU-a", "GPU-b"]) == {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}


def test_gpus_by_uuid_and_index(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = tuple(Gpu(f"GPU-{i}", "X", 80 * GIB, i) for i in range(3))
    monkeypatch.setattr(Nvidia, "gpus", lambda self: cards)
    assert discover(["all"]) == cards
    assert discover(["GPU-2", "0"]) == (cards[2], cards[0])
    for wanted, why in (
        (["GPU-7"], "this machine has no GPU 'GPU-7'; its GPUs are GPU-0, GPU-1, GPU-2; also allowed are all "),
        (["1", "GPU-1"], "the GPU 'GPU-1' is named twice"),
        (["soft", "0"], "soft must be the only value"),
    ):
        with pytest.raises(InputError, match=why):
            discover(wanted)
    monkeypatch.setattr(Nvidia, "gpus", lambda self: ())
    with pytest.raises(WorkError, match="--gpus soft starts the software GPU instead"):
        discover(["all"])
    with pytest.raises(InputError, match=r"^--gpus: this machine has no GPU; soft is"):
        discover(["0"])


def test_memory_of_an_agent_is_at_most_what_it_was_given() -> None:
    gpu = Gpu("GPU-0", "X", 80 * GIB, 0)
    assert within(None, [gpu]) == (gpu,)
    assert [g.memory_bytes for g in within(20 * GIB, [gpu])] == [20 * GIB]


def test_a_machine_without_nvml_has_no_card() -> None:
    class Nowhere(Nvidia):
        def nvml(self) -> str:
            return "/nowhere/libnvidia-ml.so.1"

    assert Nowhere().gpus() == ()
    assert (Nowhere().card("GPU-0"), Nowhere().free_bytes("GPU-0")) == (None, None)


def test_uuids_as_nvml_prints_them() -> None:
    text = "GPU-00112233-4455-6677-8899-aabbccddeeff"
    assert uuid_text(uuid_bytes(text)) == text


def test_only_devices_name_the_drivers_libraries() -> None:
    """Besides the shim, which stands in for them, and the schema of messages."""
    rooms = ("devices/", "native/", "abi/")
    names = re.compile(r"libcuda\.so|libnvidia-ml|import pynvml|\.soft\b")
    found = [
        str(path.relative_to(SOURCE))
        for path in sorted(SOURCE.rglob("*.py"))
        if not str(path.relative_to(SOURCE)).startswith(rooms) and names.search(path.read_text())
    ]
    assert found == []
