"""Mechanism whole: one tenant has the GPU for itself. The shim counts and limits memory but does not delay launches."""

from __future__ import annotations

from cotenant.abi.tenant_page import SlotFlag
from cotenant.agent.mechanisms.base import Capabilities, Enforcement, Mechanism, ShareSpec, Use
from cotenant.core.strength import Strength
from cotenant.devices.base import Gpu


class Whole(Mechanism):
    """Gives each tenant a whole GPU, which no other tenant may use."""

    name = "whole"
    uses = frozenset({Use.TENANT})
    capabilities = Capabilities(
        compute="the whole GPU; a limit below 100 % is refused",
        memory="limited by the shim, if a limit is set",
        resize="memory at once",
        isolation="no other tenant is admitted to the GPU",
        memory_by=Strength.SHIM,
        exclusive=True,
        live_resize=True,
        worker_parts=False,
    )

    def grant(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> Enforcement:
        return Enforcement(slot_flags=SlotFlag.UNGATED | SlotFlag.UNFENCED)
