"""Orders of Kubernetes' device plugin and of Slurm's prolog and epilog: hold a tenant for a pod or job, and release it.

A held tenant keeps its share and memory until it is released, even while no process of it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc.control import Caller, Handler
from cotenant.agent.lifecycle.lives import Lives
from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.agent.owners.owners import Owners
from cotenant.agent.tenants.places import Owner
from cotenant.agent.tenants.registry import Registry, spec_from_dict, spec_to_dict
from cotenant.agent.tenants.tenant import Session, Tenant
from cotenant.core.errors import InputError, TakenNameError
from cotenant.core.units import counted

KINDS = ("pod", "slurm")


class OwnerOrders:
    """Handlers of the orders of Kubernetes' device plugin and of Slurm: each takes the caller and a JSON object, and
    returns a JSON object.
    """

    def __init__(
        self,
        owners: Owners,
        registry: Registry,
        lives: Lives,
        hear: Callable[[Session, bytes], None],
        save_now: Callable[[], bool],
    ) -> None:
        """`hear` handles once more the HELLO of a process that connected before the tenant of its pod or job was held.
        """
        self._owners, self._registry, self._lives, self._hear, self._save_now = owners, registry, lives, hear, save_now
        self._changing = asyncio.Lock()  # while a tenant is prepared, an order about the same pod or job waits

    def table(self) -> dict[str, Handler]:
        """Return the handlers of the orders of Kubernetes' device plugin and of Slurm, by the orders' names."""
        return {
            "expect": self.expect, "hold": self.hold, "let_go": self.let_go, "held": self.held, "owned": self.owned
        }  # fmt: skip

    async def expect(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """From now on, let processes of pods (or jobs) without a tenant wait for a while instead of refusing them."""
        _trusted(caller)
        self._owners.expected.add(_kind(order))
        return {"ok": True}

    async def hold(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """Admit a tenant for a pod's container or a job, or change the existing tenant. Idempotent.

        The tenant exists until the order `let_go`, even if its processes end.
        """
        _trusted(caller)
        given = order.get("tenant")
        if not isinstance(given, dict) or not given.get("name"):
            raise InputError("a tenant needs a name")
        spec = spec_from_dict(given)
        owner = _owner(order)
        uid = order.get("uid", os.geteuid())
        if isinstance(uid, bool) or not isinstance(uid, int) or uid < 0:
            raise InputError(f"{uid!r} is not a numeric user id", field="uid")
        # Slurm names GPUs by index; with UUIDs the GPUs can be compared with those of the existing tenant
        named = tuple(self._registry.gpu_named(gpu, "--gpus").uuid for gpu in spec.gpus)
        spec = dataclasses.replace(spec, gpus=named)
        async with self._changing:
            known = spec.name in self._registry.tenants
            async with contextlib.nullcontext() if known else self._lives.prepared(spec):
                tenant = self._held(spec, uid, owner)
        self._save_now()  # from now on the orchestrator relies on the tenant, so it must survive a crash of the agent
        for session, hello in self._owners.arrived(owner.kind, owner.id):
            self._hear(session, hello)
        return self._row(tenant)

    def _held(self, spec: TenantSpec, uid: int, owner: Owner) -> Tenant:
        """Admit a tenant for a pod's container or a job, or change the existing one."""
        tenant = self._registry.tenants.get(spec.name)
        if tenant is not None and tenant.owner is not None and tenant.owner[:3] == owner[:3]:
            tenant = self._unless_moved(tenant, spec)
        if tenant is None:
            tenant = self._lives.add(spec, uid)
            self._owners.add(tenant, owner)
        elif tenant.owner is None or tenant.owner[:3] != owner[:3]:
            raise TakenNameError(f"a tenant named {spec.name} already exists and does not belong to this {owner.kind}")
        else:
            wanted = dataclasses.replace(spec, gpus=tenant.spec.gpus, gpu_count=tenant.spec.gpu_count)
            if spec.mechanism == mechanisms.AUTO:
                wanted = dataclasses.replace(wanted, mechanism=tenant.spec.mechanism)
            if wanted != tenant.spec:
                self._lives.change(tenant, wanted)
            if owner.container_id:
                tenant.owner = owner
        return tenant

    def _unless_moved(self, tenant: Tenant, spec: TenantSpec) -> Tenant | None:
        """Return the existing tenant of a job; None if the tenant was removed because its job restarts on other GPUs.
        """
        place = tuple(gpu.uuid for gpu in tenant.gpus)
        if not spec.gpus or set(spec.gpus) == set(place):
            return tenant
        if tenant.sessions:
            raise InputError(
                f"{spec.name} runs on {', '.join(place)} with "
                f"{counted(len(tenant.sessions), 'process', 'processes')} and cannot move to "
                f"{', '.join(spec.gpus)}"
            )
        self._release(tenant)
        return self._registry.tenants.get(spec.name)

    def _release(self, tenant: Tenant) -> None:
        self._owners.remove(tenant)
        self._lives.give_up(tenant)

    def let_go_of(self, tenant: Tenant) -> None:
        """Release a tenant whose job has ended."""
        self._release(tenant)
        self._save_now()

    async def owned(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """Return the names of the tenants held for a pod or job; every user may send this order."""
        owner = _owner(order)
        return {"names": [tenant.name for tenant in self._owners.of(owner.kind, owner.id)]}

    async def let_go(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """Release the tenants of a pod or job that has ended; with `name`, only the tenant of that name."""
        _trusted(caller)
        owner = _owner(order)
        name = order.get("name")
        async with self._changing:
            gone = [t for t in self._owners.of(owner.kind, owner.id) if name in (None, t.name)]
            for tenant in gone:
                self._release(tenant)
        self._save_now()
        return {"let_go": [tenant.name for tenant in gone]}

    async def held(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """List the tenants that are held for pods, or those held for Slurm jobs."""
        kind = _kind(order)
        tenants = self._registry.tenants.values()
        return {"held": [self._row(t) for t in tenants if t.owner is not None and t.owner.kind == kind]}

    def _row(self, tenant: Tenant) -> dict[str, Any]:
        owner = tenant.owner
        assert owner is not None
        spec = spec_to_dict(tenant.spec) | {"gpus": [gpu.uuid for gpu in tenant.gpus]}
        return spec | owner._asdict() | {"processes": len(tenant.sessions), "warnings": list(tenant.warnings)}


def _trusted(caller: Caller) -> None:
    if not caller.trusted:
        raise InputError(
            f"user {caller.peer.uid} may not hold shares for jobs or pods on this agent; only root and the agent's "
            "user may"
        )


def _kind(order: dict[str, Any]) -> str:
    kind = order.get("kind")
    if kind not in KINDS:
        raise InputError(f"unknown kind of owner {kind!r}; known: {', '.join(KINDS)}", field="kind")
    return str(kind)


def _owner(order: dict[str, Any]) -> Owner:
    kind = _kind(order)
    values = [order.get(key, "") for key in ("id", "container", "container_id")]
    if not all(isinstance(value, str) and len(value) <= 256 for value in values) or not values[0]:
        raise InputError(f"a {kind} needs an id, and optionally a container and its id, all of type string", field="id")
    return Owner(kind, *values)
