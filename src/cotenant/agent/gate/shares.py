"""Splits a GPU's in-flight budget (GPU time of launched but unfinished best-effort work) among its active processes.

Each process shares a page of memory with the agent. The process writes the time of its last launch there, and reads its
part of the budget (computed by policy/colocation/division.py). So a launch needs no system call for this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from time import monotonic_ns

from cotenant.abi.floor import STRETCH_PERMILLE
from cotenant.abi.tenant_page import SlotLayout
from cotenant.agent.tenants.tenant import Tenant
from cotenant.policy.colocation import APART, LOOK_NS, QUIET_NS, ColocationSettings, next_parts


def slot_of(tenant: Tenant, pid: int, gpu: str) -> SlotLayout | None:
    """Return the slot of a GPU in the page that a process shares with the agent; None if the process has ended or
    cannot be identified.
    """
    found = [s for s in tenant.sessions if s.peer.pid == pid and not s.closed]
    if pid == 0 or len(found) != 1:
        return None
    return next((found[0].page.slots[slot] for slot, uuid in found[0].slots.items() if uuid == gpu), None)


class Shares:
    """The best-effort processes of one GPU and their parts of its budget. A member is any key for a process; the
    process's slot in its shared page is looked up when needed.
    """

    def __init__(self, clock_ns: Callable[[], int] = monotonic_ns) -> None:
        self.parts: dict[Hashable, int] = {}
        self._finds: dict[Hashable, Callable[[], SlotLayout | None]] = {}
        self._clock_ns = clock_ns
        self._settings = ColocationSettings()
        self._timer: asyncio.TimerHandle | None = None

    def configure(self, settings: ColocationSettings) -> None:
        """Apply new co-location settings when the in-flight budget is split next."""
        self._settings = settings

    def join(self, member: Hashable, find: Callable[[], SlotLayout | None]) -> None:
        """Add a best-effort process. If it is the only one on the GPU, it gets the whole in-flight budget; otherwise it
        may have one launch in flight until the budget is split next.
        """
        self.parts[member] = APART if self.parts else 1
        self._finds[member] = find
        self._tell()
        self.watch()

    def leave(self, member: Hashable) -> None:
        """Remove a best-effort process of this GPU."""
        self.parts.pop(member, None)
        self._finds.pop(member, None)

    def look(self) -> None:
        """Split the GPU's in-flight budget again among its best-effort processes. A process whose slot is not found
        counts as active.
        """
        now_ns = self._clock_ns()
        slots = {member: find() for member, find in self._finds.items()}
        if None in slots.values():
            worked = set(slots)
        else:
            worked = {m for m, slot in slots.items() if slot is not None and now_ns - slot.floor_ns < QUIET_NS}
        self.parts = next_parts(self.parts, worked)
        self._tell()

    def _tell(self) -> None:
        for member, find in self._finds.items():
            slot = find()
            if slot is not None:
                slot.floor_parts = self.parts[member]

    def watch(self) -> None:
        """Update the parts of the in-flight budget periodically while several processes share it."""
        if self._timer is not None:
            return
        period_ns = max(LOOK_NS, self._settings.in_flight_us * STRETCH_PERMILLE)

        def due() -> None:
            self._timer = None
            self.look()
            if len(self.parts) > 1 or set(self.parts.values()) - {1}:
                self.watch()

        self._timer = asyncio.get_running_loop().call_later(period_ns / 1e9, due)

    def close(self) -> None:
        """Stop updating the parts of the in-flight budget; each process keeps the part that it has."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
