"""Room on a GPU for what is about to be taken there: an allocation that the driver refused, a context, a tenant on its
way back. Whoever is in the way leaves, if need be after its turn; what is lacking only for a moment is waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from cotenant.abi.protocol import MemoryFamily, MessageType, MoveFlag, Status
from cotenant.agent.ipc import wire
from cotenant.devices import gpus

if TYPE_CHECKING:
    from cotenant.agent.ipc.session import Session
    from cotenant.agent.memory.residency import Residency
    from cotenant.agent.tenants.registry import Tenant
    from cotenant.policy.residency import Switch

CARD_OVERHEAD_BYTES = 512 << 20  # of a real card: what the driver keeps of what NVML calls its memory
CONTEXT_BYTES = 256 << 20  # of a context, where nothing is reserved for one
PATIENCE_S = 10.0  # for room that somebody could make, but has not made yet
AGAIN_S = 0.05


class Room:
    """Requests for room, one answer each."""

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self.agent = residency.agent

    def crowded(self, tenant: Tenant, gpu: str, family: int) -> bool:
        """Whether what has just been reserved needs room that somebody else holds, or was promised. What does not move
        (contexts, arrays, all of a tenant that is parked whole) has to be there at once."""
        moves = family == MemoryFamily.PLAIN and tenant.spec.oversubscribe in ("swap", "managed")
        anybody = any(other.spec.oversubscribe != "none" for other in self.agent.registry.on_gpu(gpu))
        at_once = (family == MemoryFamily.CONTEXT and anybody) or (tenant.spec.oversubscribe != "none" and not moves)
        if moves and tenant.name in self.agent.parking:
            return True  # what its parking freed stays free
        return (at_once or moves) and self.residency.refresh(gpu).free_bytes < 0

    async def answer(self, session: Session, slot: int, sequence: int, size: int, flags: int) -> None:
        """MOVE_ROOM. Some of it cannot wait for the tenant's next turn (a context, memory that does not move)."""
        gpu, tenant = session.slots[slot], session.tenant
        now, size = bool(flags & MoveFlag.NOW), min(size, 1 << 62)
        if flags & MoveFlag.CONTEXT:
            size = session.server.context_reserve_bytes(gpu) or CONTEXT_BYTES
        status = Status.OK
        if not now and (tenant.name in self.agent.parking or self._somebody_else_runs(tenant, gpu)):
            status = Status.DENIED  # the memory comes with this tenant's next turn
        else:
            try:
                fault = await self.until(
                    tenant,
                    gpu,
                    lambda: self.residency.make_room(tenant, gpu, size),
                    PATIENCE_S,
                    lambda: not session.closed and self._could_be_made(tenant, gpu),
                    hold_off=now,
                )
            except Exception as error:  # a fault of ours must not keep the program waiting for ever
                fault = f"the agent failed: {error!r}"
            if fault is not None:
                status = Status.OUT_OF_MEMORY
                what = f"{size / 2**20:.0f} MiB more" if size else "a context"
                tenant.warn(f"there was no room for {what}: {fault}")
        session.send(wire.pack(MessageType.MOVE_ROOM_REPLY, sequence=sequence, slot=slot, status=status))

    def _somebody_else_runs(self, tenant: Tenant, gpu: str) -> bool:
        turn = self.agent.broker.turns.gpus[gpu].turn
        return turn is not None and (turn.account.name != tenant.name or turn.paused_ns is not None)

    async def until(
        self,
        tenant: Tenant,
        gpu: str,
        attempt: Callable[[], Awaitable[str | None]],
        patience_s: float,
        worth_it: Callable[[], bool],
        *,
        hold_off: bool,
    ) -> str | None:
        """Try until it works, or is not worth it any more: then the last attempt's sentence. `hold_off`: others on the
        GPU whose contents can leave get no turns meanwhile; alone there, they would never end theirs."""
        broker, held_off = self.agent.broker, set[str]()
        deadline = time.monotonic() + patience_s
        try:
            while (fault := await attempt()) is not None and worth_it() and time.monotonic() < deadline:
                for other in self.agent.registry.on_gpu(gpu, without=tenant.name) if hold_off else ():
                    if other.spec.oversubscribe != "none" and broker.holds(other, gpu):
                        broker.suspend(other)
                        held_off.add(other.name)
                await asyncio.sleep(AGAIN_S)
            return fault
        finally:
            for name in held_off - set(self.agent.parking.parked):
                if name in self.agent.registry.tenants:
                    broker.unsuspend(self.agent.registry.tenants[name])

    def _could_be_made(self, tenant: Tenant, gpu: str) -> bool:
        """Whether the tenant would fit if everybody left who can, whatever runs or starts at the moment."""
        ledger, residency = self.agent.ledger, self.residency.refresh(gpu)
        staying = ledger.used(tenant.name, gpu)
        for other in self.agent.registry.on_gpu(gpu, without=tenant.name):
            occupant = residency.occupants[other.name]
            if other.spec.oversubscribe == "park" and occupant.can_leave:
                continue
            starting = not any(state for session in other.sessions for state in session.moves.values())
            leaves = occupant.can_leave or (starting and other.spec.oversubscribe != "none")
            staying += occupant.fixed_bytes + (0 if leaves else occupant.resident_bytes)
            if leaves:  # what it is only asking for may come later
                staying -= ledger.asked(other.name, gpu, MemoryFamily.PLAIN)
        return staying <= residency.capacity_bytes - residency.overhead_bytes

    def uncharged_bytes(self, tenant: Tenant, gpu: str) -> int:
        """What contexts take for which nothing is charged (the software GPU's, without a setting): about so much."""
        slots = [(s, slot) for s in tenant.sessions for slot, attached in s.slots.items() if attached == gpu]
        made = [s for s, slot in slots if s.page.slots[slot].contexts]
        return CONTEXT_BYTES * sum(not self.agent.ledger.held(s.number, gpu, MemoryFamily.CONTEXT) for s in made)

    def lack(self, gpu: str, plan: Switch, stay: list[str]) -> str:
        """Why there is no room."""
        why = f"while {', '.join(stay)} still runs" if stay else "and nothing else on the GPU can be moved away"
        if not plan.short_bytes:
            return "the driver had no memory for it"
        known = 0 if self.agent.registry.gpus[gpu].soft else CARD_OVERHEAD_BYTES
        strangers = self.residency.gpus[gpu].overhead_bytes - known
        others = f"; {strangers / 2**20:.0f} MiB of it are held by no tenant" if strangers > 64 << 20 else ""
        return f"{plan.short_bytes / 2**20:.0f} MiB are lacking, {why}{others}"

    async def learn(self, gpu: str, not_taken: int = 0, *, refused: bool) -> None:
        """Find out how much of the card is held by nobody known here, when the sums count `not_taken` bytes that are
        not there. `refused`: because the driver had less than they say."""
        residency = self.residency.gpus[gpu]
        device = self.agent.registry.gpus[gpu]
        free = await asyncio.get_running_loop().run_in_executor(None, gpus.driver_free_bytes, device)
        self.residency.refresh(gpu)
        if free is None:
            residency.ran_short(not_taken or self.agent.config.swap_piece_bytes)
            return
        if refused and not device.soft and free >= (not_taken or self.agent.config.swap_piece_bytes):
            residency.need_margin()  # a card keeps some of what it calls free
        residency.driver_says(free, not_taken)
