"""Orders of the control socket about memory: park and resume tenants, preempt them, and swap them for benchmarks.

A parked tenant is suspended, and its GPU memory is in host memory.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from cotenant.agent.ipc.control import Caller, Handler
from cotenant.agent.memory.checkpoints import LOCK_S
from cotenant.agent.memory.parked import ParkedTable
from cotenant.agent.memory.parking import Parking
from cotenant.agent.memory.residency import Residency
from cotenant.agent.memory.residents import MOVED_BY_PROCESS, Residents
from cotenant.agent.memory.swap_orders import bytes_owner
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import Tenant
from cotenant.agent.turns.broker import Broker
from cotenant.core.errors import InputError, WorkError

MOST_S = 3600.0


class MemoryOrders:
    """Handlers of the orders about memory: each takes the caller and a JSON object, and returns a JSON object."""

    def __init__(
        self,
        parking: Parking,
        parked: ParkedTable,
        residency: Residency,
        residents: Residents,
        registry: Registry,
        broker: Broker,
    ) -> None:
        self._parking, self._parked, self._residency, self._residents = parking, parked, residency, residents
        self._registry, self._broker = registry, broker

    def table(self) -> dict[str, Handler]:
        """Return the handlers of the orders about memory, by the orders' names."""
        return {
            "park": self.park,
            "resume": self.resume,
            "preempt": self.preempt,
            "parked": self.parked,
            "exchange": self.exchange,
        }

    async def park(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """Park a tenant, or the process that the name `pid:N` means: suspend it, with its GPU memory in host memory."""
        name = self._mine(caller, order.get("name"))
        return await self._parking.park(name, _timeout_s(order, 10.0))

    async def resume(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """Resume a parked tenant, or the process that the name `pid:N` means. Tenants in the list `instead_of` are
        parked, while it returns if possible.
        """
        name = self._mine(caller, order.get("name"))
        gpu, others = order.get("gpu"), order.get("instead_of") or []
        if not isinstance(others, list):
            raise InputError("instead_of must be a list of tenants", field="instead_of")
        leave = [self._mine(caller, other) for other in others]
        return await self._parking.resume(name, None if gpu is None else str(gpu), _timeout_s(order, 60.0), leave)

    async def preempt(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """Park tenants to free a GPU for a scheduler."""
        if not caller.trusted:
            raise InputError(f"user {caller.peer.uid} may not preempt tenants of this agent")
        names = order.get("names") or []
        free = order.get("free_bytes")
        if not isinstance(names, list) or not (free is None or isinstance(free, int)):
            raise InputError("names must be a list of tenants, free_bytes a number")
        gpu = order.get("gpu")
        if gpu is not None:
            gpu = self._registry.gpu_named(str(gpu)).uuid
        return await self._parking.preempt([str(name) for name in names], gpu, free)

    async def parked(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """List the parked tenants and processes."""
        return {"parked": [parked.as_dict() for parked in self._parked.rows.values()]}

    async def exchange(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """Evict some tenants and concurrently restore other tenants, and return how long each took (for benchmarks)."""
        if not caller.trusted:
            raise InputError(f"user {caller.peer.uid} may not move tenants of this agent")
        residency = self._residency
        out = [self._tenant(name) for name in order.get("out", [])]
        back = [self._tenant(name) for name in order.get("in", [])]
        if fault := await self._residents.all_reported((*out, *back)):
            raise WorkError(f"the tenants cannot be moved: {fault}")
        for tenant in (*out, *back):
            self._broker.suspend(tenant)
            while any(self._broker.holds(tenant, gpu.uuid) for gpu in tenant.gpus):
                await asyncio.sleep(0.001)

        # memory can be passed by handle only between tenants of one owner on one GPU
        alike = len({(bytes_owner(t), t.gpus[0].uuid) for t in (*out, *back)}) == 1
        wanted = back and alike and order.get("hand", True)
        ways = residency.handle_transfer([t.name for t in out], back[0]) if wanted else None
        leaving = {tenant.name for tenant in out}

        async def timed(tenant: Tenant, way: str) -> dict[str, Any]:
            gpu = tenant.gpus[0].uuid
            occupant = self._residents.refresh(gpu).occupants[tenant.name]
            size = occupant.resident_bytes if way == "out" else occupant.missing_bytes
            count = self._residents.count(tenant.name)
            before, handed = count.parts_s(), count.handed_bytes
            began = time.monotonic()
            if way == "out":
                try:
                    good = await residency.while_busy(
                        tenant, lambda: residency.all_out(tenant, gpu, ways), began + LOCK_S
                    )
                finally:
                    leaving.discard(tenant.name)
            else:
                good = await residency.while_busy(
                    tenant, lambda: residency.all_in(tenant, gpu, ways, lambda: bool(leaving)), began + LOCK_S
                )
            if not good:
                raise WorkError(f"{tenant.name} could not be moved {way}")
            seconds = time.monotonic() - began
            parts = {part: now - before[part] for part, now in count.parts_s().items()}
            return {
                "name": tenant.name,
                "way": way,
                "bytes": size,
                "seconds": seconds,
                "handed_bytes": count.handed_bytes - handed,
            } | parts

        work = [timed(tenant, "out") for tenant in out] + [timed(tenant, "in") for tenant in back]
        try:
            moves = await asyncio.gather(*work)
        finally:
            if ways is not None:
                ways.close()
        for tenant in back if order.get("release", True) else ():
            self._broker.unsuspend(tenant)
        return {"moves": moves}

    def _tenant(self, name: Any) -> Tenant:
        tenant = self._registry.tenants.get(name) if isinstance(name, str) else None
        if tenant is None or tenant.spec.oversubscribe not in MOVED_BY_PROCESS:
            raise InputError(f"{name!r} is not a tenant whose processes swap their own memory", field="NAME")
        return tenant

    def _mine(self, caller: Caller, name: Any) -> str:
        """Check that the caller of an order may move the memory of the tenant or process with this name; returns the
        name. Raises InputError if the caller may not.
        """
        if not isinstance(name, str) or not name:
            raise InputError("name a tenant, or a process as pid:N", field="NAME")
        tenant = self._registry.tenants.get(name)
        if not caller.trusted and (tenant is None or tenant.uid != caller.peer.uid):
            raise InputError(f"{name} is not a tenant of user {caller.peer.uid}")
        return name


def _timeout_s(order: dict[str, Any], default: float) -> float:
    value = order.get("timeout_s", default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= MOST_S:
        raise InputError(f"{str(value)[:40]!r} is not a time over 0 s and up to one hour", field="--timeout")
    return float(value)
