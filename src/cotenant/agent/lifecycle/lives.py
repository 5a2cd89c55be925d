"""Admission, change and removal of tenants.

A tenant that a launcher registered exists as long as its program, another process of the tenant, or a descendant of
one of these runs. Tenants declared in the configuration, and those held for a pod or job, also exist without processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import AsyncIterator, Callable, Collection

from cotenant.agent import processes
from cotenant.agent.config.choices import least
from cotenant.agent.config.files import TenantSpec
from cotenant.agent.lifecycle.accounts import Accounts
from cotenant.agent.memory.parked import ParkedTable
from cotenant.agent.processes import ProcessKey
from cotenant.agent.tenants.orphans import Orphans, by_token
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import Tenant
from cotenant.agent.turns.history import History
from cotenant.core.errors import InputError, WorkError

START_WITHIN_S = 30.0
LOOK_S = 0.25
RETURN_LOOK_S = 1.0


class Lives:
    """Admits, changes and removes the tenants of this node."""

    def __init__(
        self,
        registry: Registry,
        accounts: Accounts,
        parked: ParkedTable,
        history: History,
        save: Callable[[], None],
    ) -> None:
        self._registry, self._accounts, self._parked, self._history = registry, accounts, parked, history
        self._save = save
        self._orphans = Orphans(registry.tenants, self.maybe_remove, save)
        self._root_fds: dict[str, int] = {}
        self._awaited: dict[str, asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def prepared(self, spec: TenantSpec) -> AsyncIterator[None]:
        """Context manager in which a tenant is added. Its mechanism first prepares the GPU (for example by starting an
        MPS daemon) in a thread, because the preparation may be slow, and undoes that if the tenant is not added.
        """
        ahead = self._registry.preparing(spec)
        if ahead is not None:
            mechanism, gpus = ahead
            await asyncio.to_thread(mechanism.prepare, spec, gpus)
        try:
            yield
        except (InputError, WorkError):
            if ahead is not None:
                ahead[0].settle(spec, ahead[1])
            raise

    def add(self, spec: TenantSpec, uid: int, *, token: str | None = None, declared: bool = False) -> Tenant:
        """Admit a tenant to its GPUs, and put its share and limits into effect. Raises InputError if the GPUs have no
        room for it.
        """
        tenant = self._registry.admit(spec, uid, token=token, declared=declared)
        try:
            self._accounts.limits.check(tenant)
        except InputError:
            self._registry.remove(tenant)
            raise
        tenant.created_ns = time.monotonic_ns()
        self._accounts.open(tenant)
        self._history.decided(f"{spec.name} admitted: {promise(tenant.spec)}")
        return tenant

    def expects(self, pid: int) -> None:
        """Prepare `starts` for this process. Blocks for milliseconds: call it in a thread."""
        self._accounts.limits.expect(pid)

    async def starts(self, tenant: Tenant, pid: int) -> None:
        """Move a process that is about to start a tenant's program into the tenant's control group. Raises InputError
        if a required memory limit cannot be enforced.
        """
        await self._accounts.limits.begin(tenant, pid)

    def change(self, tenant: Tenant, spec: TenantSpec) -> str:
        """Change a tenant's share and limits. Returns in words when the change takes effect. Raises InputError."""
        before, when = tenant.spec, self._registry.resize(tenant, spec)
        try:
            if _memory_terms(before) != _memory_terms(spec):
                self._accounts.limits.check(tenant)
            self._accounts.open(tenant)
        except InputError:
            self._registry.resize(tenant, before)
            raise
        if beyond := self._accounts.beyond(tenant):
            when = f"{when}; {beyond}"
        self._history.decided(f"{tenant.name} changed: {promise(spec)}; takes effect: {when}")
        self._save()
        return when

    def take_turns(self, uuid: str, why: str) -> None:
        """Let the tenants of a GPU take turns, because its hardware time slices cannot be controlled."""
        for tenant in self._registry.refuse_slices(uuid, why):
            self._accounts.to_turns(tenant)
            text = "the tenant takes turns that the agent grants, because its GPU's time slices cannot be controlled"
            self._history.warned(tenant, f"{text}: {why}")
        self._save()

    def set_root(self, tenant: Tenant, key: ProcessKey) -> None:
        """Record that the tenant's program runs. The tenant then exists as long as the program or any of its
        descendants."""
        tenant.root = key
        fd = processes.pidfd(key)
        if fd is None:
            tenant.root = None
            self._orphans.watch(tenant, key.pid)
            return
        self._root_fds[tenant.name] = fd
        asyncio.get_running_loop().add_reader(fd, self._root_ended, tenant)

    def _root_ended(self, tenant: Tenant) -> None:
        fd = self._root_fds.pop(tenant.name, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
        group = tenant.root.pid if tenant.root is not None else None
        tenant.root = None
        self._orphans.watch(tenant, group)

    def watch_orphans(self, tenant: Tenant, known: Collection[ProcessKey]) -> None:
        """Keep a tenant whose program has ended until the remaining processes end. `known`: processes that the previous
        agent knew.
        """
        self._orphans.watch(tenant, known=known)

    def await_program(self, tenant: Tenant, launcher: ProcessKey) -> None:
        """Keep a tenant of the previous agent that was killed before the launcher could report the tenant's program,
        until the program is found.
        """
        tenant.launching, tenant.launcher = True, launcher
        self._awaited[tenant.name] = asyncio.get_running_loop().create_task(self._await_program(tenant, launcher))

    async def _await_program(self, tenant: Tenant, launcher: ProcessKey) -> None:
        end, found = time.monotonic() + START_WITHIN_S, frozenset[ProcessKey]()
        while tenant.launching and not found and not tenant.sessions:
            if time.monotonic() > end or not processes.alive(launcher):
                break
            await asyncio.sleep(LOOK_S)
            found = (await asyncio.to_thread(by_token, [tenant.token])).get(tenant.token, found)
        self._awaited.pop(tenant.name, None)
        if tenant.launching and self._registry.tenants.get(tenant.name) is tenant:
            tenant.launching = False
            self._orphans.watch(tenant, known=found)

    def awaits(self, tenant: Tenant, launcher: ProcessKey) -> bool:
        """Whether this is a tenant that the launcher registered at the previous agent, and whose program is awaited."""
        return tenant.name in self._awaited and tenant.launcher == launcher

    def unanswered(self, tenant: Tenant, launcher: ProcessKey) -> bool:
        """Remove a tenant that its launcher registers again, because the previous agent was killed before it answered.
        Returns whether it was one.
        """
        if not self.awaits(tenant, launcher) or tenant.sessions or tenant.declared or tenant.owner:
            return False
        self._awaited.pop(tenant.name).cancel()
        tenant.launching = False
        self.maybe_remove(tenant)
        return self._registry.tenants.get(tenant.name) is not tenant

    def idle(self, tenant: Tenant) -> bool:
        """Return whether a tenant is idle: it has no process that runs or is starting, none left behind by its program,
        none that is about to return after a restart of the agent, and none that is parked.
        """
        root_lives = tenant.root is not None and tenant.name in self._root_fds
        busy = root_lives or tenant.sessions or tenant.left_behind or tenant.launching or _returns(tenant)
        return not busy and not self._parked.lives(tenant.name)

    def choose(self, tenant: Tenant, spec: TenantSpec) -> None:
        """Give an idle tenant the share and memory that its launcher chose. If the tenant's GPU has too little left,
        the tenant moves to a GPU that has enough. Raises InputError.
        """
        elsewhere = [] if spec.gpus else self._registry.with_room(spec)
        if elsewhere and tenant.gpus[0] not in elsewhere:
            self._accounts.move(tenant, elsewhere[0].uuid)
        self.change(tenant, spec)

    def maybe_remove(self, tenant: Tenant) -> None:
        """Remove a tenant that has no program, process or launcher left, unless it is declared in the configuration or
        held for a pod or job.
        """
        if tenant.owner is not None:
            return
        if not self.idle(tenant):
            if _returns(tenant) and not tenant.sessions:
                # no event tells of the end of a process that has not connected again
                asyncio.get_running_loop().call_later(RETURN_LOOK_S, self.maybe_remove, tenant)
            return
        if tenant.declared:
            self._accounts.limits.rest(tenant)
            # what the launcher chose applied only to the program that has ended
            if (spec := least(tenant.spec)) != tenant.spec:
                self.change(tenant, spec)
            return
        if self._registry.tenants.get(tenant.name) is not tenant:
            return
        self._accounts.close(tenant)
        self._registry.remove(tenant)
        self._parked.rows.pop(tenant.name, None)
        self._history.left(tenant)
        self._save()

    def give_up(self, tenant: Tenant) -> None:
        """Remove a tenant. If processes of it still run, it stays with its limits but without a request until they end.
        """
        self.maybe_remove(tenant)
        if tenant.name in self._registry.tenants:
            self.change(tenant, dataclasses.replace(tenant.spec, request=0.0))

    def close(self) -> None:
        """Stop watching tenants whose programs have ended."""
        self._orphans.close()
        for task in self._awaited.values():
            task.cancel()
        for fd in self._root_fds.values():
            os.close(fd)


def _returns(tenant: Tenant) -> bool:
    return any(processes.alive(key) for key in tenant.returning)


def _memory_terms(spec: TenantSpec) -> tuple[object, ...]:
    """Return the settings of a tenant that decide whether its memory limit can be enforced as strongly as it demands.
    """
    return spec.enforce_memory, spec.oversubscribe, spec.memory_bytes is None


def promise(spec: TenantSpec) -> str:
    """Describe a tenant's share and memory limit in words."""
    memory = "" if spec.memory_bytes is None else f", memory {spec.memory_bytes / 2**30:.1f} GiB"
    return f"request {spec.request:.0%}, limit {spec.limit:.0%}{memory}, by {spec.mechanism}"
