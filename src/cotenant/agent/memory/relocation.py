"""A tenant on another GPU: its accounts, its share and the pages of its processes follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotenant.abi.protocol import MessageType
from cotenant.agent.ipc import wire
from cotenant.devices import gpus

if TYPE_CHECKING:
    from cotenant.agent.daemon import Agent
    from cotenant.agent.tenants.registry import Tenant


def relocate(agent: Agent, tenant: Tenant, target: str) -> None:
    """Move a parked tenant of one GPU to `target`. InputError, and nothing changed, when it does not fit there."""
    home = tenant.gpus[0]
    gpu = agent.registry.gpus[target]
    agent.registry.check_fits(tenant.spec, gpu)
    if tenant.name in agent.broker.turns.gpus[home.uuid].accounts:
        agent.broker.leave(tenant)
    agent.residency.gpus[home.uuid].remove(tenant.name)
    agent.registry.replace(tenant, gpu)
    agent.ledger.leave(tenant.name, home.uuid)
    for session in tenant.sessions:
        agent.ledger.rehome(session.number, home.uuid, target)
        for slot, attached in list(session.slots.items()):
            if attached == home.uuid:
                session.slots[slot] = target
                session.page.slots[slot].uuid[:] = list(gpus.uuid_bytes(target))
    agent.server.copies.move(tenant, home.uuid)
    for session in tenant.sessions:
        session.send(wire.pack(MessageType.PAGE_UPDATE))  # they join the floor and the link of that GPU
    agent.open_accounts(tenant)
