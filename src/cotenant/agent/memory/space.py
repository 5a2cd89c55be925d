"""Makes space on a GPU for an allocation that the driver refused, for a context, or for a tenant that is resumed.

Other tenants are evicted, if necessary after their turn. If they cannot be evicted yet, the request waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from cotenant.abi.protocol import MessageType, MoveFlag, Status
from cotenant.agent.ipc import wire
from cotenant.agent.memory.parked import ParkedTable
from cotenant.agent.memory.residency import Residency
from cotenant.agent.memory.residents import CONTEXT_BYTES, Residents
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import Session, Tenant
from cotenant.agent.turns.broker import Broker
from cotenant.agent.turns.hold import SPACE

PATIENCE_S = 10.0  # how long a request waits for tenants that cannot be evicted yet
AGAIN_S = 0.05


class SpaceMaker:
    """Answers processes' requests for space on a GPU."""

    def __init__(
        self, residency: Residency, residents: Residents, registry: Registry, broker: Broker, parked: ParkedTable
    ) -> None:
        self._residency, self._residents, self._registry = residency, residents, registry
        self._broker, self._parked = broker, parked

    def ask(self, session: Session, slot: int, sequence: int, size: int, flags: int) -> None:
        """Handle a process's message MOVE_ROOM: the driver has refused an allocation, or has no space for a context."""
        self._residency.start(self._answer(session, slot, sequence, size, flags))

    async def _answer(self, session: Session, slot: int, sequence: int, size: int, flags: int) -> None:
        """Make space and answer the process. For memory that it needs before its tenant's next turn, such as a context,
        space is made at once (flag NOW). Other memory can wait: while the tenant is parked or is being evicted, or the
        GPU's turn is another tenant's or paused, the answer is DENIED, and space is made when the tenant's next turn
        begins.
        """
        gpu, tenant = session.slots[slot], session.tenant
        now, size = bool(flags & MoveFlag.NOW), min(size, 1 << 62)
        if flags & MoveFlag.CONTEXT:
            size = self._residents.context_reserve_bytes(gpu) or CONTEXT_BYTES
        status = Status.OK

        def goes() -> bool:
            """Whether the tenant is parked, perhaps only since the request came: its memory must not come back."""
            return not now and self._residents.goes(tenant, gpu)

        if goes() or (not now and self._somebody_else_runs(tenant, gpu)):
            status = Status.DENIED  # the process gets the memory when this tenant's next turn begins
        else:
            try:
                fault = await self.until(
                    tenant,
                    gpu,
                    lambda: self._residency.make_space(tenant, gpu, size, given_up=goes),
                    PATIENCE_S,
                    lambda: not session.closed and not goes() and self._residents.could_fit(tenant, gpu),
                    hold_off=now,
                )
            except Exception as error:  # if the agent fails here, the program must not wait for ever
                fault = f"the agent failed: {error!r}"
            if goes():
                status = Status.DENIED
            elif fault is not None:
                status = Status.OUT_OF_MEMORY
                what = f"{size / 2**20:.0f} MiB more" if size else "a context"
                tenant.warn(f"the GPU has no space for {what}: {fault}")
        session.send(wire.pack(MessageType.MOVE_ROOM_REPLY, sequence=sequence, slot=slot, status=status))

    def _somebody_else_runs(self, tenant: Tenant, gpu: str) -> bool:
        turn = self._broker.turns.gpus[gpu].turn
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
        """Call `attempt`, which makes space for `tenant`, until it returns no error, `worth_it` returns False, or
        `patience_s` has passed. Returns its last error, or None.

        A tenant cannot be evicted during its turn, and a turn may go on for as long as no other tenant requests one.
        `tenant` requests only space, so another tenant's turn might never end. With `hold_off`, the other swappable
        tenants that have a turn on the GPU are therefore suspended until this method returns.
        """
        held_off = set[Tenant]()
        deadline = time.monotonic() + patience_s
        try:
            while (fault := await attempt()) is not None and worth_it() and time.monotonic() < deadline:
                for other in self._registry.on_gpu(gpu, without=tenant.name) if hold_off else ():
                    turns = other.spec.oversubscribe != "none" and self._registry.takes_turns(other)
                    if turns and self._broker.holds(other, gpu):
                        self._broker.suspend(other, SPACE)
                        held_off.add(other)
                await asyncio.sleep(AGAIN_S)
            return fault
        finally:
            for other in held_off:
                if self._registry.tenants.get(other.name) is other:
                    self._broker.unsuspend(other, SPACE)
