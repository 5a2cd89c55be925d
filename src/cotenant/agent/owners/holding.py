"""Orders of an orchestrator's helper: hold a tenant open for a pod or job, let go of it, list what is held."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from cotenant.agent.ipc.control import Caller, Handler
from cotenant.agent.owners.holders import Holder
from cotenant.agent.tenants.registry import Tenant, spec_from_dict, spec_to_dict
from cotenant.core.errors import InputError

if TYPE_CHECKING:
    from cotenant.agent.daemon import Agent

KINDS = ("pod", "slurm")


class Holding:
    """The orders; each takes the caller and a JSON object and returns one."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    def table(self) -> dict[str, Handler]:
        """op -> what carries it out."""
        return {"expect": self.expect, "hold": self.hold, "let_go": self.let_go, "held": self.held}

    async def expect(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """From now on processes of pods (or jobs) that are not known yet wait a moment instead of being refused."""
        _trusted(caller)
        self.agent.server.holders.expected.add(_kind(order))
        return {"ok": True}

    async def hold(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """Admit a tenant for a pod's container or a job, or change the one that is there; twice is once.

        The tenant stays, whatever its processes do, until `let_go`.
        """
        _trusted(caller)
        agent = self.agent
        given = order.get("tenant")
        if not isinstance(given, dict) or not given.get("name"):
            raise InputError("a tenant needs a name")
        spec = spec_from_dict(given)
        holder = _holder(order)
        uid = order.get("uid", os.geteuid())
        if isinstance(uid, bool) or not isinstance(uid, int) or uid < 0:
            raise InputError(f"{uid!r} is not a user's number", field="uid")
        tenant = agent.registry.tenants.get(spec.name)
        if tenant is None:
            tenant = agent.add_tenant(spec, uid)
            keep(agent, tenant, holder)
        elif tenant.holder is None or tenant.holder[:3] != holder[:3]:
            raise InputError(f"a tenant named {spec.name} is there already, and not for this {holder.kind}")
        else:
            place = tuple(gpu.uuid for gpu in tenant.gpus)
            if spec.gpus and spec.gpus != place:
                raise InputError(f"{spec.name} is on {', '.join(place)} and cannot move to {', '.join(spec.gpus)}")
            wanted = dataclasses.replace(spec, gpus=tenant.spec.gpus, gpu_count=tenant.spec.gpu_count)
            if wanted != tenant.spec:
                agent.change_tenant(tenant, wanted)
            if holder.container_id:
                tenant.holder = holder
        agent.save_now()  # the orchestrator relies on it from here on
        for session, hello in agent.server.holders.arrived(holder.kind, holder.id):
            agent.server.hear(session, hello)
        return self._row(tenant)

    async def let_go(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """The pod or job has ended: its share is free at once. With a name only that tenant, else all of them."""
        _trusted(caller)
        agent = self.agent
        holder = _holder(order)
        name = order.get("name")
        gone = [t for t in agent.server.holders.of(holder.kind, holder.id) if name in (None, t.name)]
        for tenant in gone:
            agent.server.holders.remove(tenant)
            tenant.holder = None
            agent.maybe_remove(tenant)
            if tenant.name in agent.registry.tenants:  # processes are left: they keep their limits and lose the claim
                agent.change_tenant(tenant, dataclasses.replace(tenant.spec, request=0.0))
        agent.save_now()
        return {"let_go": [tenant.name for tenant in gone]}

    async def held(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """Everything held for orchestrators of a kind."""
        kind = _kind(order)
        tenants = self.agent.registry.tenants.values()
        return {"held": [self._row(t) for t in tenants if t.holder is not None and t.holder.kind == kind]}

    def _row(self, tenant: Tenant) -> dict[str, Any]:
        holder = tenant.holder
        assert holder is not None
        spec = spec_to_dict(tenant.spec) | {"gpus": [gpu.uuid for gpu in tenant.gpus]}
        return spec | holder._asdict() | {"processes": len(tenant.sessions), "warnings": list(tenant.warnings)}


def keep(agent: Agent, tenant: Tenant, holder: Holder) -> None:
    """A tenant belongs to an orchestrator from now on."""
    tenant.holder = holder
    agent.server.holders.add(tenant)


def _trusted(caller: Caller) -> None:
    if not caller.trusted:
        raise InputError(f"user {caller.peer.uid} may not hold tenants on this agent")


def _kind(order: dict[str, Any]) -> str:
    kind = order.get("kind")
    if kind not in KINDS:
        raise InputError(f"{kind!r} is not {' or '.join(KINDS)}", field="kind")
    return str(kind)


def _holder(order: dict[str, Any]) -> Holder:
    kind = _kind(order)
    values = [order.get(key, "") for key in ("id", "container", "container_id")]
    if not all(isinstance(value, str) and len(value) <= 256 for value in values) or not values[0]:
        raise InputError(f"a {kind} has an id, and perhaps a container and its id, all of them text", field="id")
    return Holder(kind, *values)
