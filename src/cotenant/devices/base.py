"""Interface of a device kind: the questions whose answers differ between a real GPU and the software GPU."""

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
    """One GPU. `uuid` is GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx, the only identity; `index` is for display; `kind`
    names its Device.
    """

    uuid: str
    name: str
    memory_bytes: int
    index: int
    kind: str = "nvidia"

    def as_dict(self) -> dict[str, object]:
        """Plain data for --json."""
        return asdict(self)


class Clock(Protocol):
    """Reads how fast a GPU's clock runs."""

    def part(self) -> float:
        """Current SM clock as a fraction of the highest. OSError if it cannot be read."""


class Device(ABC):
    """A kind of GPU. Questions about one GPU take its Gpu or UUID."""

    name: ClassVar[str]  # Gpu.kind
    word: ClassVar[str]  # the word by which --gpus selects all of them
    simulated: ClassVar[bool] = False  # kernels only take time and compute nothing: benchmarks scale their sizes
    # tenants without a named mechanism get time slices where the driver supports them
    slices_first: ClassVar[bool] = False
    overhead_bytes: ClassVar[int] = 0  # memory that the driver reserves for itself
    context_bytes: ClassVar[int] = 0  # memory of a context whose size is not known
    spare_bytes: ClassVar[int] = 0  # free memory that a restored process needs in addition to its own
    free_is_usable: ClassVar[bool] = True  # all memory that the driver reports as free can be allocated

    @abstractmethod
    def driver(self) -> Path:
        """Path of the driver library; WorkError if there is none."""

    @abstractmethod
    def nvml(self) -> str:
        """Name of the NVML library, or of its stand-in, as the loader takes it."""

    def tenant_nvml(self) -> Path | None:
        """The NVML library that the shim wraps in a tenant; None: a tenant finds none."""
        return None

    def mps_control(self) -> str | None:
        """The MPS control command; None: processes run concurrently without a daemon."""
        return "nvidia-cuda-mps-control"

    def environment(self, uuids: Iterable[str]) -> dict[str, str]:
        """Environment in which a program sees these GPUs and no others, without an agent."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(uuids)}

    def gpus(self) -> tuple[Gpu, ...]:
        """All GPUs of this kind on this machine; none without a driver."""
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
        """Free memory of a GPU by the driver; None if it does not answer."""
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

    def cgroups(self) -> Hierarchy | None:
        """The control groups by which the driver limits memory; None if it never does."""
        return None

    def compute_mode(self, uuid: str) -> str:
        """The compute mode of a GPU by NVML, which says what processes may use it; empty if not known."""
        try:
            return Cards(self.nvml()).card(uuid).compute_mode()
        except OSError:
            return ""

    def faults(self, uuids: Iterable[str]) -> dict[str, str]:
        """UUID -> why the GPU cannot be used now, for GPUs that cannot."""
        return {}

    def processes(self, uuids: Iterable[str]) -> dict[str, list[int]]:
        """UUID -> processes with a context there; empty if nothing is known."""
        return {}

    def channel_controls(self) -> ChannelControls:
        """Controls of the channel groups of programs; WorkError says why there are none."""
        raise WorkError(f"channel groups of {self.word} cannot be set")

    def meter(self, uuid: str, controls: ChannelControls) -> Meter:
        """A meter of the GPU time that each process has used. WorkError: this kind has none."""
        raise WorkError(f"the GPU time that each process has used is not known for {self.word}")

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
