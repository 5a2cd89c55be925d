"""time: turns of the whole GPU, handed out by the token broker and kept by the shim."""

from __future__ import annotations

from cotenant.agent.mechanisms.base import Capabilities, Mechanism, Use
from cotenant.core.strength import Strength


class Time(Mechanism):
    """Token turns: one tenant at a time."""

    name = "time"
    uses = frozenset({Use.TENANT, Use.SERVICE, Use.JOB})
    capabilities = Capabilities(
        compute="at least the request while asking, at most the limit, over the window; one kernel may overrun a"
        " turn and is charged",
        memory="capped by the shim over all allocation families",
        resize="at once",
        isolation="one tenant runs at a time; a kernel cannot be stopped once it runs, so one that hangs delays the"
        " others until stuck_after and then runs beside them",
        time_by=Strength.SHIM,
        memory_by=Strength.SHIM,
        gated=True,
        live_resize=True,
        worker_parts=False,
        notes=("needs the shim in the process: a program that escapes it is reported, not stopped",),
    )
