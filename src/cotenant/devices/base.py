"""Interface of a kind of GPU: all that differs between NVIDIA GPUs and the software GPU, which simulates one."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from cotenant.core.cgroups import Cgroups
from cotenant.core.errors import WorkError
from cotenant.devices.cards import Card, Cards
from cotenant.devices.channel_groups import ChannelControls
from cotenant.devices.meters import Meter


@dataclass(frozen=True)
class Gpu:
    """One GPU. `uuid` (GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx) identifies it; `index` is for display; `kind` is the
    name of its Device.
    """

    uuid: str
    name: str
    memory_bytes: int
    index: int
    kind: str = "nvidia"

    def as_dict(self) -> dict[str, object]:
        """The GPU in JSON types, for --json."""
        return asdict(self)


class Clock(Protocol):
    """Interface of an object that reads how fast a GPU's clock runs."""

    def part(self) -> float:
        """Current SM clock as a fraction of the highest. Raises OSError if it cannot be read."""


class Device(ABC):
    """A kind of GPU. Methods about one GPU take its Gpu object or its UUID."""

    name: ClassVar[str]  # the value of Gpu.kind for GPUs of this kind
    word: ClassVar[str]  # the value of the option --gpus that selects all GPUs of this kind
    # whether kernels only take time and compute nothing; benchmarks then use other workloads than on a real GPU
    simulated: ClassVar[bool] = False
    # whether tenants with the mechanism `auto` get hardware time slices if the driver supports them
    slices_first: ClassVar[bool] = False
    overhead_bytes: ClassVar[int] = 0  # memory that the driver reserves for itself
    context_bytes: ClassVar[int] = 0  # memory that is charged to a tenant for a context whose real size is not known
    # memory that must be free, besides a process's own size, when the process is restored
    spare_bytes: ClassVar[int] = 0
    free_is_usable: ClassVar[bool] = True  # whether programs can allocate all memory that the driver reports as free
    # what to do where the driver is too old for memory limits, and where the MPS control command is missing
    limits_remedy: ClassVar[str] = "install that release or a newer one"
    mps_remedy: ClassVar[str] = "install the version that belongs to this driver"

    @abstractmethod
    def driver(self) -> Path:
        """Path of the CUDA driver library. Raises WorkError if there is none."""

    @abstractmethod
    def nvml(self) -> str:
        """Name or path by which the loader finds the NVML library, or the library that stands in for NVML."""

    def tenant_nvml(self) -> Path | None:
        """Path of the NVML library that tenants use through the shim; None: tenants have no NVML."""
        return None

    def mps_control(self) -> str | None:
        """The MPS control command; None if processes run concurrently without an MPS daemon."""
        return "nvidia-cuda-mps-control"

    def environment(self, uuids: Iterable[str]) -> dict[str, str]:
        """Return the variables with which a program that runs without an agent sees only the given GPUs."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(uuids)}

    def identity(self, uuid: str) -> str:
        """Return a text that no other GPU of this machine has."""
        return uuid

    def gpus(self) -> tuple[Gpu, ...]:
        """All GPUs of this kind on this machine; empty if there is no driver."""
        try:
            return tuple(
                Gpu(card.uuid, card.name(), card.memory().total_bytes, card.index, self.name)
                for card in Cards(self.nvml()).all()
            )
        except OSError:
            return ()

    def card(self, uuid: str) -> Card | None:
        """Clocks, power and memory of one GPU; None if they cannot be read."""
        try:
            return Cards(self.nvml()).card(uuid)
        except OSError:
            return None

    def free_bytes(self, uuid: str) -> int | None:
        """Free memory of a GPU as the driver reports it; None if the driver does not answer."""
        try:
            return Cards(self.nvml()).card(uuid).memory().free_bytes
        except OSError:
            return None

    def release(self) -> str:
        """Release of the driver; empty if it is not known."""
        try:
            return Cards(self.nvml()).release()
        except OSError:
            return ""

    def cgroups(self) -> Cgroups | None:
        """The control groups (cgroups) on which the driver limits GPU memory; None if GPUs of this kind have no limits
        by control group.
        """
        return None

    def compute_mode(self, uuid: str) -> str:
        """The compute mode of a GPU, which says whether several processes may use it; empty if not known."""
        try:
            return Cards(self.nvml()).card(uuid).compute_mode()
        except OSError:
            return ""

    def faults(self, uuids: Iterable[str]) -> dict[str, str]:
        """Return the given GPUs that cannot be used now: UUID -> the reason."""
        return {}

    def processes(self, uuids: Iterable[str]) -> dict[str, list[int]]:
        """UUID -> pids of the processes with a context on that GPU. GPUs that the driver cannot read are left out."""
        found: dict[str, list[int]] = {}
        for uuid in uuids:
            with contextlib.suppress(OSError):
                found[uuid] = Cards(self.nvml()).card(uuid).processes()
        return found

    def channel_controls(self) -> ChannelControls:
        """Control of programs' channel groups, which the GPU gives time slices to. Raises WorkError that says why they
        cannot be controlled.
        """
        raise WorkError(f"the time slices of channel groups cannot be set on {self.word}")

    def meter(self, uuid: str, controls: ChannelControls) -> Meter:
        """Open a meter of the GPU time that each process has used. Raises WorkError if that time cannot be measured."""
        raise WorkError(f"the GPU time of each process cannot be measured on {self.word}")

    def mig_instances(self, uuid: str) -> list[tuple[str, str]]:
        """Profile and UUID of each MIG instance of a GPU."""
        return []


def uuid_text(raw: bytes) -> str:
    """Format the 16 bytes of a CUuuid as NVML does: GPU-xxxxxxxx-..."""
    digits = raw.hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def uuid_bytes(text: str) -> bytes:
    """Parse a UUID as NVML prints it (GPU-... or MIG-...) into 16 bytes."""
    return bytes.fromhex(text.removeprefix("GPU-").removeprefix("MIG-").replace("-", ""))
