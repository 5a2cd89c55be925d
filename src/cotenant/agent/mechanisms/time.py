"""time: turns of the whole GPU, handed out by the token broker and kept by the shim."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotenant.agent.mechanisms.base import Capabilities, Enforcement, Mechanism

if TYPE_CHECKING:
    from cotenant.agent.config.files import TenantSpec
    from cotenant.devices.gpus import Gpu


class Time(Mechanism):
    """Token turns: one tenant at a time."""

    name = "time"

    def capabilities(self) -> Capabilities:
        """See Mechanism."""
        return Capabilities(
            compute="at least the request while asking, at most the limit, over the window; one kernel may overrun a"
            " turn and is charged",
            memory="capped by the shim over all allocation families",
            resize="at once",
            isolation="one tenant runs at a time; a kernel cannot be stopped once it runs, so one that hangs delays the"
            " others until stuck_after and then runs beside them",
            exclusive=False,
            gated=True,
            notes=("needs the shim in the process: a program that escapes it is reported, not stopped",),
        )

    def grant(self, spec: TenantSpec, gpus: tuple[Gpu, ...]) -> Enforcement:
        """See Mechanism."""
        return Enforcement()

    def resize(self, spec: TenantSpec, gpus: tuple[Gpu, ...]) -> str:
        """See Mechanism."""
        return "at once"

    def revoke(self, name: str, gpus: tuple[Gpu, ...]) -> None:
        """See Mechanism."""
