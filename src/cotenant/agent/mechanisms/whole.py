"""whole: the GPU to itself. The shim counts and caps memory; nothing is gated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotenant.agent.ipc.wire import SlotFlag
from cotenant.agent.mechanisms.base import Capabilities, Enforcement, Mechanism

if TYPE_CHECKING:
    from cotenant.agent.config.files import TenantSpec
    from cotenant.devices.gpus import Gpu


class Whole(Mechanism):
    """One tenant per GPU."""

    name = "whole"

    def capabilities(self) -> Capabilities:
        """See Mechanism."""
        return Capabilities(
            compute="the whole GPU; a limit below 100 % is refused",
            memory="capped by the shim, if a cap is set",
            resize="memory at once",
            isolation="no other tenant is admitted to the GPU",
            exclusive=True,
            gated=False,
        )

    def grant(self, spec: TenantSpec, gpus: tuple[Gpu, ...]) -> Enforcement:
        """See Mechanism."""
        return Enforcement({}, SlotFlag.UNGATED | SlotFlag.UNFENCED)

    def resize(self, spec: TenantSpec, gpus: tuple[Gpu, ...]) -> str:
        """See Mechanism."""
        return "at once"

    def revoke(self, name: str, gpus: tuple[Gpu, ...]) -> None:
        """See Mechanism."""
