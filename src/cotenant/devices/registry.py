"""The only list of device kinds (NVIDIA, software), and the GPUs that a value of `--gpus` selects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cotenant.core.errors import InputError, WorkError
from cotenant.devices.base import Device, Gpu
from cotenant.devices.nvidia import Nvidia
from cotenant.devices.soft import Soft

DEVICES: dict[str, Device] = {device.name: device for device in (Nvidia(), Soft())}


def device(kind: str) -> Device:
    """The device kind with this name, a value of Gpu.kind."""
    return DEVICES[kind]


def device_of(gpu: Gpu) -> Device:
    """The device kind of a GPU."""
    return DEVICES[gpu.kind]


def device_named(gpus: str) -> Device:
    """The device kind that a value of --gpus selects: `soft` is the software GPU, all other values are NVIDIA GPUs."""
    return next((each for each in DEVICES.values() if each.word == gpus), DEVICES[Nvidia.name])


def discover(wanted: Sequence[str]) -> tuple[Gpu, ...]:
    """The GPUs that --gpus selects: `soft`, `all`, or UUIDs and indices. Raises InputError for an unknown GPU, and
    WorkError if there are no GPUs.
    """
    if len(wanted) == 1 and wanted[0] in {each.word for each in DEVICES.values()}:
        found = device_named(wanted[0]).gpus()
        if not found:
            raise WorkError("no NVIDIA GPU was found; --gpus soft starts the software GPU instead")
        return found
    if Soft.word in wanted:
        raise InputError("soft must be the only value: the software GPU cannot be mixed with real GPUs", field="--gpus")
    real = DEVICES[Nvidia.name].gpus()
    chosen: list[Gpu] = []
    for text in wanted:
        match = [g for g in real if text in (g.uuid, str(g.index))]
        if not match:
            if not real:
                raise InputError("this machine has no GPU; soft is the software GPU", field="--gpus")
            known = ", ".join(g.uuid for g in real)
            raise InputError(
                f"this machine has no GPU {text!r}; its GPUs are {known}; also allowed are all (all of these) and soft "
                "(the software GPU)",
                field="--gpus",
            )
        if match[0] in chosen:
            raise InputError(f"the GPU {text!r} is named twice", field="--gpus")
        chosen.append(match[0])
    return tuple(chosen)


def within(memory_bytes: int | None, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return the GPUs with their memory reduced to at most `memory_bytes` each; memory above that is left to programs
    that are not tenants.
    """
    if memory_bytes is None:
        return tuple(gpus)
    return tuple(replace(gpu, memory_bytes=min(gpu.memory_bytes, memory_bytes)) for gpu in gpus)
