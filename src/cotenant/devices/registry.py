"""The one list of devices, and the GPUs that `--gpus` names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cotenant.core.errors import InputError, WorkError
from cotenant.devices.base import Device, Gpu
from cotenant.devices.nvidia import Nvidia
from cotenant.devices.soft import Soft

DEVICES: dict[str, Device] = {device.name: device for device in (Nvidia(), Soft())}


def device(kind: str) -> Device:
    """A device by the name that Gpu.kind has."""
    return DEVICES[kind]


def device_of(gpu: Gpu) -> Device:
    """The device that a GPU is one of."""
    return DEVICES[gpu.kind]


def device_named(gpus: str) -> Device:
    """The device that a value of --gpus means: one by its word, else NVIDIA's, whose UUIDs and indices they are."""
    return next((each for each in DEVICES.values() if each.word == gpus), DEVICES[Nvidia.name])


def discover(wanted: Sequence[str]) -> tuple[Gpu, ...]:
    """GPUs by `soft`, `all`, or UUIDs / indices. InputError for an unknown one, WorkError when there are none."""
    if len(wanted) == 1 and wanted[0] in {each.word for each in DEVICES.values()}:
        found = device_named(wanted[0]).gpus()
        if not found:
            raise WorkError("no NVIDIA GPU was found; --gpus soft starts the software GPU instead")
        return found
    if Soft.word in wanted:
        raise InputError("soft stands alone: the software GPU never mixes with real ones", field="--gpus")
    real = DEVICES[Nvidia.name].gpus()
    chosen: list[Gpu] = []
    for text in wanted:
        match = [g for g in real if text in (g.uuid, str(g.index))]
        if not match:
            known = ", ".join(g.uuid for g in real) or "none on this machine"
            raise InputError(f"no GPU {text!r} here; known: {known}; or all, or soft", field="--gpus")
        if match[0] in chosen:
            raise InputError(f"the GPU {text!r} is named twice", field="--gpus")
        chosen.append(match[0])
    return tuple(chosen)


def within(memory_bytes: int | None, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs with at most that much memory each: the rest is for programs that are no tenants."""
    if memory_bytes is None:
        return tuple(gpus)
    return tuple(replace(gpu, memory_bytes=min(gpu.memory_bytes, memory_bytes)) for gpu in gpus)
