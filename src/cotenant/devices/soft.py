"""The software GPU: a driver library of this project's own, for machines without a card."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from cotenant.core.errors import WorkError
from cotenant.devices.base import Device, Gpu
from cotenant.devices.cards import Cards
from cotenant.devices.cgroups import Hierarchy
from cotenant.devices.channel_groups import SOFTWARE, ChannelControls
from cotenant.devices.meters import ControlMeter, Meter


class Soft(Device):
    """The GPUs that the software GPU's library simulates."""

    name = "soft"
    word = "soft"
    simulated = True

    def driver(self) -> Path:
        """See Device."""
        from cotenant.native.libraries import SOFT_DRIVER, library_path

        return library_path(SOFT_DRIVER)

    def nvml(self) -> str:
        """See Device."""
        from cotenant.native.libraries import SOFT_NVML, library_path

        return str(library_path(SOFT_NVML))

    def mps_control(self) -> str | None:
        """See Device: a stand-in for the command, where one is named."""
        return os.environ.get("COTENANT_SOFTGPU_MPS")

    def environment(self, uuids: Iterable[str]) -> dict[str, str]:
        """See Device: which of them a program sees is for the agent's launcher to say."""
        return {}

    def cgroups(self) -> Hierarchy | None:
        """See Device: a folder that plays them, where the environment names one."""
        from cotenant.softgpu.cgroups import FolderCgroups

        return FolderCgroups.found()

    def channel_controls(self) -> ChannelControls:
        """See Device."""
        from cotenant.softgpu.controls import SoftIoctl

        ioctl = SoftIoctl()
        return ChannelControls(SOFTWARE, ioctl, ioctl.path)

    def meter(self, uuid: str, controls: ChannelControls) -> Meter:
        """See Device."""
        return ControlMeter(controls)

    def processes(self, uuids: Iterable[str]) -> dict[str, list[int]]:
        """See Device: as its own NVML lists them."""
        try:
            return {uuid: Cards(self.nvml()).card(uuid).processes() for uuid in uuids}
        except OSError:
            return {}

    def gpus(self) -> tuple[Gpu, ...]:
        """See Device."""
        found = super().gpus()
        if not found:
            raise WorkError("the software GPU failed: its state file cannot be used")
        return found
