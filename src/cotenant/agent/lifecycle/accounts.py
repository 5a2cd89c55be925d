"""Opens, moves and closes what the agent keeps for a tenant on each of its GPUs: memory charges, turns, copy queue."""

from __future__ import annotations

from cotenant.abi.protocol import MessageType
from cotenant.abi.tenant_page import SlotFlag
from cotenant.agent.copies.links import Copies
from cotenant.agent.ipc import wire
from cotenant.agent.memory.ledger import Ledger
from cotenant.agent.memory.pages import MemoryPages
from cotenant.agent.memory.residents import Residents
from cotenant.agent.memory_limits.enforcer import MemoryLimits
from cotenant.agent.slices.enforcer import SliceEnforcer
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import Tenant
from cotenant.agent.turns.broker import Broker
from cotenant.core.units import format_bytes
from cotenant.devices.base import uuid_bytes

NO_TURN = 1 << 63  # a number that no turn on a GPU ever has


class Accounts:
    """Puts tenants' shares and memory limits into effect on their GPUs, and lifts them when tenants move or leave."""

    def __init__(
        self,
        registry: Registry,
        ledger: Ledger,
        pages: MemoryPages,
        residents: Residents,
        broker: Broker,
        copies: Copies,
        slices: SliceEnforcer,
        limits: MemoryLimits,
    ) -> None:
        self._registry, self._ledger, self._pages, self._residents = registry, ledger, pages, residents
        self._broker, self._copies, self._slices, self.limits = broker, copies, slices, limits

    def open(self, tenant: Tenant) -> None:
        """Put a tenant's new or changed share and memory limit into effect on its GPUs. Raises InputError, with nothing
        changed, if the driver refuses the memory limit.
        """
        self.limits.follow(tenant)
        movable = tenant.spec.oversubscribe != "none"
        for gpu in tenant.gpus:
            self._ledger.cap(tenant.name, gpu.uuid, tenant.cap_bytes(gpu))
            self._ledger.keep(tenant.name, gpu.uuid, tenant.kept_bytes, movable=movable)
            self._pages.publish(tenant, gpu.uuid)
            self._pages.publish_kept(gpu.uuid)
        if self._registry.takes_turns(tenant):
            self._broker.join(tenant)
        if self._registry.sliced(tenant):
            self._slices.join(tenant)
        self._copies.join(tenant)

    def beyond(self, tenant: Tenant) -> str:
        """A sentence about a tenant that uses more memory than its new limit; empty if it does not."""
        for gpu in tenant.gpus if tenant.spec.oversubscribe == "none" else ():
            used = max(self._ledger.used(tenant.name, gpu.uuid), self.limits.used_bytes(tenant, gpu))
            cap = tenant.cap_bytes(gpu)
            if cap is not None and used > cap:
                return (
                    f"the tenant keeps the {format_bytes(used)} that it uses on GPU {gpu.index}, but its new "
                    f"allocations fail until it uses less than {format_bytes(cap)}"
                )
        return ""

    def close(self, tenant: Tenant) -> None:
        """Free what was kept for a tenant that is removed (memory charges, turns, copy queue). The tenant's processes
        must have ended.
        """
        self._broker.leave(tenant)
        self._slices.leave(tenant)
        self._ledger.forget(tenant.name)
        for gpu in tenant.gpus:
            self._pages.publish_kept(gpu.uuid)
        self._copies.leave(tenant)
        self.limits.end(tenant)
        self._residents.forget(tenant.name)

    def move(self, tenant: Tenant, target: str) -> None:
        """Move a parked tenant from its only GPU to `target` (a UUID), and update the shared pages of its processes.
        Raises InputError, with nothing changed, if the target has no room for the tenant, or the driver refuses its
        limit.
        """
        home, gpu = tenant.gpus[0], self._registry.gpus[target]
        self._registry.check_fits(tenant.spec, [gpu])
        self.limits.precede(tenant, gpu)
        self._broker.leave(tenant)
        self._slices.leave(tenant)
        self._residents.gpus[home.uuid].remove(tenant.name)
        self._registry.replace(tenant, gpu)
        self._ledger.leave(tenant.name, home.uuid)
        self.limits.leave(tenant, home)
        for session in tenant.sessions:
            self._ledger.rehome(session.number, home.uuid, target)
        for session, slot in tenant.slots_on(home.uuid):
            session.slots[slot] = target
            session.page.slots[slot].uuid[:] = list(uuid_bytes(target))
        self._copies.move(tenant, home.uuid)
        for session in tenant.sessions:
            # on this message the process joins the LS gate (where best-effort launches wait for latency-sensitive work)
            # and the copy scheduling of its new GPU
            session.send(wire.pack(MessageType.PAGE_UPDATE))
        self.open(tenant)

    def to_turns(self, tenant: Tenant) -> None:
        """Switch a tenant from hardware time slices to turns: from now on, launches of its processes wait for a turn.
        """
        self._slices.leave(tenant)
        for session in tenant.sessions:
            for slot in session.slots:
                page = session.page.slots[slot]
                page.epoch = NO_TURN
                page.flags &= ~(SlotFlag.UNGATED | SlotFlag.UNFENCED)
            session.send(wire.pack(MessageType.PAGE_UPDATE))
        self.open(tenant)
