"""The software GPU: a CUDA driver library of this project that simulates a GPU, for machines without one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from cotenant.core.cgroups import Cgroups
from cotenant.core.errors import WorkError
from cotenant.devices.base import Device, Gpu
from cotenant.devices.channel_groups import SOFTWARE, ChannelControls
from cotenant.devices.meters import ControlMeter, Meter


class Soft(Device):
    """The kind of the GPUs that the software GPU's library simulates."""

    name = "soft"
    word = "soft"
    simulated = True
    limits_remedy = "python -m cotenant.softgpu.cgroups makes a stand-in (docs/howto/memory-limits.md)"
    mps_remedy = "python -m cotenant.softgpu.mps makes a stand-in (docs/howto/sharing-one-gpu.md)"

    def driver(self) -> Path:
        from cotenant.native.libraries import SOFT_DRIVER, library_path

        return library_path(SOFT_DRIVER)

    def nvml(self) -> str:
        from cotenant.native.libraries import SOFT_NVML, library_path

        return str(library_path(SOFT_NVML))

    def mps_control(self) -> str | None:
        """See Device. Returns the path of a stand-in for the MPS control command, from the environment variable
        COTENANT_SOFTGPU_MPS; None if the variable is not set.
        """
        return os.environ.get("COTENANT_SOFTGPU_MPS")

    def environment(self, uuids: Iterable[str]) -> dict[str, str]:
        """See Device. No variables are needed: only the agent's launcher limits which GPUs a program sees."""
        return {}

    def identity(self, uuid: str) -> str:
        """See Device. Software GPUs with different state files have the same UUIDs."""
        state = os.environ.get("COTENANT_SOFTGPU_STATE") or f"/dev/shm/cotenant-softgpu-{os.getuid()}"
        return f"{uuid} {os.path.realpath(state)}"

    def cgroups(self) -> Cgroups | None:
        """See Device. Returns control groups that are imitated in a folder, which the environment variable
        COTENANT_SOFTGPU_CGROUPS names; None if the variable is not set.
        """
        from cotenant.softgpu.cgroups import FolderCgroups

        return FolderCgroups.found()

    def channel_controls(self) -> ChannelControls:
        from cotenant.softgpu.controls import SoftIoctl

        ioctl = SoftIoctl()
        return ChannelControls(SOFTWARE, ioctl, ioctl.path)

    def meter(self, uuid: str, controls: ChannelControls) -> Meter:
        return ControlMeter(controls)

    def gpus(self) -> tuple[Gpu, ...]:
        found = super().gpus()
        if not found:
            raise WorkError("the software GPU cannot use its state file; COTENANT_SOFTGPU_STATE names another one")
        return found
