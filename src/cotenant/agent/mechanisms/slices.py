"""Mechanism slices: the GPU runs tenants in hardware time slices; the agent sets their lengths, and stops and resumes
tenants.
"""

from __future__ import annotations

from pathlib import Path

from cotenant.abi.tenant_page import SlotFlag
from cotenant.agent.mechanisms.base import Capabilities, Enforcement, Mechanism, ShareSpec, Use
from cotenant.core.errors import WorkError
from cotenant.core.strength import Strength
from cotenant.devices.base import Gpu
from cotenant.devices.registry import device_of


class Slices(Mechanism):
    """Hardware time slices, which the agent sets without the tenant's cooperation."""

    name = "slices"
    uses = frozenset({Use.TENANT})
    capabilities = Capabilities(
        compute="a tenant that has work gets at least its request and at most its limit in 2 s; kernels are preempted",
        memory="the shim limits the sum of all kinds of allocations",
        resize="at once",
        isolation="one tenant runs at a time; a kernel that hangs delays no other tenant, and best-effort work "
        "yields to latency-sensitive work in one switch of 0.2 ms",
        time_by=Strength.HARDWARE,
        memory_by=Strength.SHIM,
        sliced=True,
        live_resize=True,
        worker_parts=False,
        notes=("a tenant can change its time slice: the agent reads it back, restores it and reports that",),
    )

    def __init__(self, folder: Path, gpus: tuple[Gpu, ...] = ()) -> None:
        super().__init__(folder, gpus)
        self.refused: dict[str, str] = {}  # GPU's UUID -> why its driver does not let the agent control time slices

    def offers(self, gpu: Gpu) -> bool:
        """Whether a tenant whose mechanism is `auto` gets hardware time slices on this GPU."""
        return device_of(gpu).slices_first and not self.refused.get(gpu.uuid) and not self.refusal(gpu)

    def refusal(self, gpu: Gpu) -> str:
        """Why hardware time slices cannot be controlled on a GPU of a kind that has them; empty if they can, or if the
        kind has none.
        """
        device = device_of(gpu)
        try:
            if device.slices_first:
                device.channel_controls()
        except WorkError as error:
            return str(error)
        return ""

    def prepare(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> None:
        """Open the interface that sets the GPUs' time slices. For the software GPU, a library may have to be compiled
        first, which is slow.
        """
        for gpu in gpus:
            device_of(gpu).channel_controls()

    def grant(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> Enforcement:
        """Grant a share. Raises WorkError if the driver rejects control of time slices."""
        for gpu in gpus:
            why = self.refused.get(gpu.uuid)
            if why:
                raise WorkError(f"{self.name}: {why}")
            device_of(gpu).channel_controls()
        return Enforcement(slot_flags=SlotFlag.UNGATED | SlotFlag.UNFENCED)
