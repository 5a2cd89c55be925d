"""NVIDIA GPUs: finds the driver's libraries, and implements the interface Device by NVML and the kernel driver."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from cotenant.core.cgroups import Cgroups
from cotenant.core.errors import WorkError
from cotenant.devices import mig, nvml
from cotenant.devices.base import Device
from cotenant.devices.channel_groups import ChannelControls
from cotenant.devices.context_switches import SwitchLog
from cotenant.devices.meters import Meter

RELEASE, PROC = Path("/sys/module/nvidia/version"), Path("/proc/driver/nvidia")
DRIVER, NVML = "libcuda.so.1", "libnvidia-ml.so.1"
# folders in which distributions, containers and WSL install the driver's libraries; searched if the loader does not
# find them
PLACES = (
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib/wsl/lib",
)


class Nvidia(Device):
    """All NVIDIA GPUs of this machine."""

    name = "nvidia"
    word = "all"
    slices_first = True
    overhead_bytes = 512 << 20
    context_bytes = 640 << 20  # a context with its modules takes 610 MiB on an H100 (driver 580, PyTorch)
    spare_bytes = 256 << 20
    free_is_usable = False

    def driver(self) -> Path:
        found = find_library(DRIVER)
        if found is None:
            raise WorkError(f"no NVIDIA driver library ({DRIVER}) was found on this machine")
        return found

    def nvml(self) -> str:
        """See Device. The loader finds NVIDIA's library by this name."""
        return NVML

    def tenant_nvml(self) -> Path | None:
        return find_library(NVML)

    def cgroups(self) -> Cgroups | None:
        return Cgroups()

    def faults(self, uuids: Iterable[str]) -> dict[str, str]:
        """See Device. Reports GPUs that NVML cannot read, because they are lost or need a reset."""
        wanted = list(uuids)
        try:
            with nvml.Nvml() as session:
                return {uuid: fault for uuid in wanted if (fault := session.fault(uuid))}
        except ImportError:
            return {}
        except WorkError as error:
            return dict.fromkeys(wanted, str(error))

    def channel_controls(self) -> ChannelControls:
        """See Device. Raises WorkError also on WSL and in vGPU guests, which do not have the NVIDIA kernel module."""
        try:
            release = RELEASE.read_text().strip()
        except OSError:
            raise WorkError(f"{RELEASE} cannot be read: this machine has no NVIDIA kernel module") from None
        return ChannelControls(release)

    def meter(self, uuid: str, controls: ChannelControls) -> Meter:
        return SwitchLog(uuid, minor_of(uuid))

    def mig_instances(self, uuid: str) -> list[tuple[str, str]]:
        try:
            with nvml.Nvml() as session:
                (row,) = mig.export(session, uuid)["gpus"]
        except (ImportError, WorkError):
            return []
        return [(found["profile"], found["uuid"]) for found in row["instances"] if found["uuid"]]


def minor_of(uuid: str) -> int:
    """Number of a GPU's device file (/dev/nvidiaN), as the kernel module reports it; 0 if it does not."""
    for path in PROC.glob("gpus/*/information"):
        with contextlib.suppress(OSError):
            text = path.read_text()
            number = re.search(r"^Device Minor:\s*(\d+)", text, re.M)
            if uuid in text and number is not None:
                return int(number[1])
    return 0


def find_library(name: str) -> Path | None:
    """Path of a driver library's versioned file; None if it is not found."""
    candidates = [Path(place) / name for place in PLACES]
    candidates += [Path(place) / name for place in os.environ.get("LD_LIBRARY_PATH", "").split(":") if place]
    if (found := _loader_cache_path(name)) is not None:
        candidates.insert(0, found)
    for candidate in candidates:
        if candidate.exists():
            return candidate.resolve()
    return None


def _loader_cache_path(name: str) -> Path | None:
    try:
        listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return None
    for line in listed.splitlines():
        if line.strip().startswith(name + " ") and "x86-64" in line and "=>" in line:
            return Path(line.split("=>")[1].strip())
    return None
