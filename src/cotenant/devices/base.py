"""What a device is: the questions about a kind of GPU whose answers differ between a card and the software GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from cotenant.core.errors import WorkError
from cotenant.devices.cards import Card, Cards
from cotenant.devices.cgroups import Hierarchy
from cotenant.devices.channel_groups import ChannelControls
from cotenant.devices.meters import Meter


@dataclass(frozen=True)
class Gpu:
    """One GPU. `uuid` is GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx, the only identity; `index` is for people; `kind`
    names its Device."""

    uuid: str
    name: str
    memory_bytes: int
    index: int
    kind: str = "nvidia"

    def as_dict(self) -> dict[str, object]:
        """Plain data for --json."""
        return asdict(self)


class Clock(Protocol):
    """Something that knows how fast a GPU's clock is."""

    def part(self) -> float:
        """The SM clock now, over the highest. OSError where it cannot be read."""


class Device(ABC):
    """A kind of GPU. What is asked of one GPU takes its Gpu or UUID."""

    name: ClassVar[str]  # Gpu.kind
    word: ClassVar[str]  # what --gpus calls all of them
    simulated: ClassVar[bool] = False  # kernels only take time: benchmarks scale their sizes
    monitored: ClassVar[bool] = True  # NVML knows its health and all of its processes
    slices_first: ClassVar[bool] = False  # tenants that name no mechanism get time slices where the driver takes them
    overhead_bytes: ClassVar[int] = 0  # of its memory, what the driver keeps for itself
    context_bytes: ClassVar[int] = 0  # what a context takes whose size is not known
    spare_bytes: ClassVar[int] = 0  # free memory that a restored process needs beside its own
    free_is_usable: ClassVar[bool] = True  # all that the driver calls free can be allocated

    @abstractmethod
    def driver(self) -> Path:
        """The driver library; WorkError where there is none."""

    @abstractmethod
    def nvml(self) -> str:
        """NVML's library, or what stands in for it, as the loader takes it."""

    def tenant_nvml(self) -> Path | None:
        """The NVML library that the shim stands before in a tenant; None: a tenant finds none."""
        return None

    def mps_control(self) -> str | None:
        """The MPS control command; None: processes run at once without a daemon."""
        return "nvidia-cuda-mps-control"

    def environment(self, uuids: Iterable[str]) -> dict[str, str]:
        """What a program needs to see these GPUs and no others, without an agent."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(uuids)}

    def gpus(self) -> tuple[Gpu, ...]:
        """All GPUs of this kind here; none where there is no driver."""
        try:
            return tuple(
                Gpu(card.uuid, card.name(), card.memory().total_bytes, card.index, self.name)
                for card in Cards(self.nvml()).all()
            )
        except OSError:
            return ()

    def card(self, uuid: str) -> Card | None:
        """Clocks, power and memory of one GPU; None where they cannot be read."""
        try:
            return Cards(self.nvml()).card(uuid)
        except OSError:
            return None

    def free_bytes(self, uuid: str) -> int | None:
        """What the driver has free on a GPU; None where it does not answer."""
        try:
            return Cards(self.nvml()).card(uuid).memory().free_bytes
        except OSError:
            return None

    def release(self) -> str:
        """Release of the driver; empty where it is not known."""
        try:
            return Cards(self.nvml()).release()
        except OSError:
            return ""

    def cgroups(self) -> Hierarchy | None:
        """The control groups by which the driver limits memory; None where it never does."""
        return None

    def compute_mode(self, uuid: str) -> str:
        """Who may use a GPU, in NVML's words; empty where that is not known."""
        try:
            return Cards(self.nvml()).card(uuid).compute_mode()
        except OSError:
            return ""

    def faults(self, uuids: Iterable[str]) -> dict[str, str]:
        """UUID -> why the GPU cannot be used now, for those that cannot."""
        return {}

    def processes(self, uuids: Iterable[str]) -> dict[str, list[int]]:
        """UUID -> processes with a context there; empty where nothing is known."""
        return {}

    def channel_controls(self) -> ChannelControls:
        """Controls on the channel groups of programs; WorkError says why there are none."""
        raise WorkError(f"channel groups of {self.word} cannot be set")

    def meter(self, uuid: str, controls: ChannelControls) -> Meter:
        """What knows how much of a GPU's time processes have had. WorkError: nothing does."""
        raise WorkError(f"how much of its time processes have had of a GPU of {self.word} is not known")

    def mig_instances(self, uuid: str) -> list[tuple[str, str]]:
        """(profile, UUID) of the MIG instances of a GPU."""
        return []


def uuid_text(raw: bytes) -> str:
    """The 16 bytes of a CUuuid as NVML prints them."""
    digits = raw.hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def uuid_bytes(text: str) -> bytes:
    """The reverse of uuid_text."""
    return bytes.fromhex(text.removeprefix("GPU-").removeprefix("MIG-").replace("-", ""))
