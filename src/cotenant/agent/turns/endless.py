"""Turns without end, which tenants under hardware time slices have if their memory can be moved off their GPU.

All such tenants of a GPU have their turns at the same time. A tenant loses its turn only while its memory is moved or
is not on the GPU.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from cotenant.abi.protocol import NO_DEADLINE, MessageType
from cotenant.agent.ipc import wire
from cotenant.agent.tenants.tenant import Session, Tenant
from cotenant.agent.turns.hold import ENDLESS, PausedTurn, Residents


class EndlessTurns:
    """Grants and revokes turns without end. All methods run in one event loop."""

    def __init__(self, residents: Residents, paused: asyncio.Queue[PausedTurn], number: Callable[[], int]) -> None:
        """`paused` takes the turns that wait for their tenant's memory; `number` returns a new number of a turn."""
        self._residents, self._paused, self._number = residents, paused, number
        # (GPU, tenant) in `paused`; not the tenant's name, which a new tenant may have when this one has ended
        self._waiting: set[tuple[str, Tenant]] = set()

    def grant(self, session: Session, slot: int) -> None:
        """Grant a process a turn. If memory of its tenant is not on the GPU, the process waits until `begin`. That is
        so if an agent was killed while it evicted memory, or a process allocated memory while its tenant was parked.
        """
        tenant, gpu = session.tenant, session.slots[slot]
        if not self._residents.ready(tenant, gpu):
            session.asking.add(slot)
            if (gpu, tenant) not in self._waiting:
                self._waiting.add((gpu, tenant))
                self._paused.put_nowait(PausedTurn(tenant, gpu, ENDLESS))
            return
        session.asking.discard(slot)
        page, epoch = session.page.slots[slot], session.granted.get(slot)
        if epoch is None or page.epoch != epoch:  # otherwise the process has a turn, and asked before it knew of it
            epoch = session.granted[slot] = self._number()
        page.deadline_ns, page.epoch = NO_DEADLINE, epoch
        session.send(wire.pack_grant(0, slot, time.monotonic_ns(), epoch, NO_DEADLINE, 0))

    def begin(self, tenant: Tenant, gpu: str) -> None:
        """Grant turns to all processes of a tenant that wait for one on this GPU."""
        self._waiting.discard((gpu, tenant))
        for session, slot in tenant.slots_on(gpu):
            if slot in session.asking:
                self.grant(session, slot)

    def takes(self, paused: PausedTurn) -> bool:
        """Take a turn out of `paused`; returns whether a process still waits for it."""
        self._waiting.discard((paused.gpu, paused.tenant))
        return any(slot in session.asking for session, slot in paused.tenant.slots_on(paused.gpu))

    def revoke(self, tenant: Tenant) -> None:
        """Revoke the turns of all processes of a tenant. Each ends when the process has returned it."""
        for session in tenant.sessions:
            for slot, epoch in session.granted.items():
                session.page.slots[slot].epoch = 0
                session.send(wire.pack(MessageType.TOKEN_REVOKE, {"epoch": epoch}, slot=slot))

    def holds(self, tenant: Tenant, gpu: str) -> bool:
        """Whether a process of a tenant has a turn on a GPU, or has not returned a revoked one yet."""
        return any(slot in session.granted for session, slot in tenant.slots_on(gpu))
