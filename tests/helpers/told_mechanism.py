"""The mechanism `told`, as small as a mechanism can be, for a test: it enforces nothing and only tells the program its
limit."""

from __future__ import annotations

from cotenant.agent.mechanisms.base import Capabilities, Enforcement, Mechanism, ShareSpec, Use
from cotenant.devices.base import Gpu


class Told(Mechanism):
    """Programs must keep to their limits themselves."""

    name = "told"
    uses = frozenset(Use)
    capabilities = Capabilities(
        compute="what the programs do", memory="not enforced", resize="a new program", isolation="none", concurrent=True
    )

    def grant(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> Enforcement:
        """See Mechanism."""
        return Enforcement({"TOLD_LIMIT": f"{spec.limit:g}"}, super().grant(spec, gpus).slot_flags)
