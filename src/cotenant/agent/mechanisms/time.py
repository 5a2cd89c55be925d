"""Mechanism time: tenants take turns on the whole GPU. The agent grants the turns, and the shim delays a tenant's
launches until the tenant has a turn.
"""

from __future__ import annotations

from cotenant.agent.mechanisms.base import Capabilities, Mechanism, Use
from cotenant.core.strength import Strength


class Time(Mechanism):
    """Enforces shares by turns: only one tenant at a time launches work on the GPU."""

    name = "time"
    uses = frozenset({Use.TENANT, Use.SERVICE, Use.JOB})
    capabilities = Capabilities(
        compute="a tenant that has work gets at least its request and at most its limit in the time `window` of the "
        "agent's settings; one kernel may run beyond the end of a turn, and its time is charged",
        memory="the shim limits the sum of all kinds of allocations",
        resize="at once",
        isolation="one tenant runs at a time; a running kernel cannot be stopped, so one that hangs delays the "
        "others until stuck_after and then runs concurrently with them",
        time_by=Strength.SHIM,
        memory_by=Strength.SHIM,
        gated=True,
        live_resize=True,
        worker_parts=False,
        notes=("needs the shim in the process: a program without it is reported, not stopped",),
    )
