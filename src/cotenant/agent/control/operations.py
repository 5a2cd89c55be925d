"""Orders of the control socket about the agent, its tenants and co-location."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from cotenant.agent import processes
from cotenant.agent.config.by_hand import SETTABLE, by_hand_rows, changed_by_hand, value_text
from cotenant.agent.config.choices import FIELDS, choose, differs
from cotenant.agent.config.colocation import changed
from cotenant.agent.config.files import TenantSpec, check_spec
from cotenant.agent.control.rows import Rows
from cotenant.agent.gate.floor import Floors
from cotenant.agent.ipc.control import Caller, Handler
from cotenant.agent.lifecycle.lives import Lives
from cotenant.agent.memory.parked import ParkedTable
from cotenant.agent.tenants.orphans import by_token
from cotenant.agent.tenants.registry import Registry, spec_from_dict
from cotenant.agent.tenants.stopping import kill
from cotenant.agent.tenants.tenant import Tenant
from cotenant.agent.turns.history import History
from cotenant.core.errors import InputError, TakenNameError
from cotenant.policy.colocation import scheme_named

STARTING_S = 5.0  # how long `stop` waits for a program that is starting
YEAR_S = 366 * 86400.0


class Operations:
    """Handlers of the orders about the agent, its tenants and co-location: each takes the caller and a JSON object, and
    returns a JSON object.
    """

    def __init__(
        self,
        rows: Rows,
        registry: Registry,
        lives: Lives,
        floors: Floors,
        parked: ParkedTable,
        history: History,
        socket: Path,
        save: Callable[[], None],
        release: Callable[[Tenant], Awaitable[str]],
    ) -> None:
        """`socket`: path of the socket to which tenants' programs connect. `release` removes a tenant whose pod or job
        has ended; if it cannot, it returns the reason.
        """
        self._rows, self._registry, self._lives, self._floors = rows, registry, lives, floors
        self._parked, self._history, self._socket, self._save = parked, history, socket, save
        self._release = release

    def table(self) -> dict[str, Handler]:
        """Return the handlers of the orders about the agent, its tenants and co-location, by the orders' names."""
        return {
            "status": self.status,
            "register": self.register,
            "started": self.started,
            "list": self.list_tenants,
            "set": self.set_share,
            "stop": self.stop,
            "mechanisms": self.mechanisms,
            "warnings": self.warnings,
            "colocation": self.colocation,
        }

    # -- orders that change nothing --------------------------------------------------------------------------------

    async def status(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """Describe the agent and its GPUs."""
        return self._rows.status()

    async def mechanisms(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """List what enforces shares, memory limits and isolation on each GPU, and each mechanism's capabilities."""
        each = {name: m.capabilities.as_dict() for name, m in self._registry.mechanisms.items()}
        mps = await asyncio.to_thread(self._rows.find_mps)
        return {"gpus": self._rows.promises(mps), "mechanisms": each}

    async def list_tenants(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """List all tenants with request, limit and received share, and parked processes that belong to no tenant."""
        tenants = []
        for tenant in list(self._registry.tenants.values()):
            tenants.append(self._rows.tenant(tenant))
            await asyncio.sleep(0)  # the event loop also switches tenants
        programs = [parked.as_dict() for parked in self._parked.rows.values() if parked.name.startswith("pid:")]
        return {"agent": self._rows.status(), "tenants": tenants, "parked": programs}

    async def warnings(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """Return the warnings about a tenant, which may have ended shortly before."""
        name = str(order.get("name"))
        tenant = self._registry.tenants.get(name)
        return {"warnings": list(tenant.warnings) if tenant else self._history.departed.get(name, [])}

    # -- orders that change something ------------------------------------------------------------------------------

    async def register(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """Admit a new tenant for a launcher, or let it start a program of an existing tenant. The answer contains the
        program's environment.

        A tenant that the agent's configuration declares has the limits stated there; where they are ranges, the
        launcher may choose.
        """
        given = order.get("tenant")
        if not isinstance(given, dict) or not given.get("name"):
            raise InputError("a tenant needs a name", field="--name")
        if order.get("launches") is True:
            await asyncio.to_thread(self._lives.expects, caller.peer.pid)
        spec = spec_from_dict(given)
        existing = self._registry.tenants.get(spec.name)
        if existing is not None and (existing.declared or existing.owner):
            self._check_user(caller, existing)
            tenant = existing
            if not tenant.spec.enforce_memory.at_least(spec.enforce_memory):
                raise InputError(
                    f"{tenant.name} is declared in the agent's configuration: set there how its memory is "
                    f"enforced (memory: {{bytes: ..., enforce: {spec.enforce_memory}}})",
                    field="--enforce-memory",
                )
            self._choose(caller, tenant, given)
            if not tenant.sessions and tenant.root is None:
                tenant.warnings.clear()  # the warnings were about an earlier run
        elif existing is not None and order.get("join"):
            self._check_user(caller, existing)
            tenant = existing
        else:
            if existing is not None and not self._lives.unanswered(existing, processes.key_of(caller.peer.pid)):
                raise TakenNameError(
                    f"a tenant named {spec.name} is running; choose another name, or --join to share its budget",
                    field="--name",
                )
            if order.get("join"):  # without this check, a misspelt name would create a new tenant without limits
                self._find({"name": spec.name})
            if (why := self._rows.in_force.left_out.get(spec.name)) is not None:
                # a declared tenant that was admitted as a new one would not have the limits of its declaration
                raise InputError(
                    f"{spec.name} is declared in the agent's configuration, but the agent has not admitted it: {why}",
                    field="--name",
                )
            if not caller.trusted:
                raise InputError(
                    f"user {caller.peer.uid} may only start tenants declared in the agent's configuration, and "
                    f"{spec.name} is not",
                    field="--name",
                )
            timeout_s = None if order.get("timeout_s") is None else _seconds(order, "timeout_s", 0.0)
            async with self._lives.prepared(spec):
                tenant = self._lives.add(spec, caller.peer.uid)
            tenant.timeout_s = timeout_s
            self._launches(caller, tenant)
        # processes that the caller starts from now on belong to the tenant
        if order.get("launches") is True and tenant.owner is None:
            await self._lives.starts(tenant, caller.peer.pid)
        self._save()
        environment = tenant.environment(below=scheme_named(self._floors.settings.scheme).be_below)
        environment.setdefault("CUDA_VISIBLE_DEVICES", ",".join(gpu.uuid for gpu in tenant.gpus))
        return {
            "name": tenant.name,
            "token": tenant.token,
            "socket": str(self._socket),
            "device": tenant.gpus[0].kind,
            "parked": tenant.name in self._parked.rows,
            "gpus": [gpu.as_dict() for gpu in tenant.gpus],
            "environment": environment,
        }

    def _choose(self, caller: Caller, tenant: Tenant, given: dict[str, Any]) -> None:
        """Give a declared tenant the values that its launcher chose. Raises InputError if its declaration does not
        allow them.
        """
        numbers = {key: _number(given, key) for key in (*FIELDS, "weight") if given.get(key) is not None}
        if tenant.owner and any(numbers.values()):
            raise InputError(
                f"the share of {tenant.name} is set by its job: leave out --request, --limit and --memory",
                field="--name",
            )
        if numbers.pop("weight", 0):
            raise InputError(
                f"{tenant.name} is declared in the agent's configuration, which sets its weight: leave out --weight",
                field="--name",
            )
        if tenant.owner or not any(numbers.values()):
            return
        for key in tenant.by_hand.keys() & numbers.keys():
            if numbers[key] and numbers[key] != getattr(tenant.spec, key):  # request 0: the launcher chose none
                has = value_text(key, getattr(tenant.spec, key))
                option = FIELDS[key].option
                raise InputError(f"{tenant.name} has {has}, set by hand: leave out {option}", field="--name")
        spec = check_spec(choose(tenant.spec, numbers))
        if self._lives.idle(tenant):
            self._lives.choose(tenant, spec)
        elif has := differs(tenant.spec, numbers):
            raise InputError(
                f"{tenant.name} is already running, with {has}: leave out --request, --limit and --memory to "
                "run within that share",
                field="--name",
            )
        # the chosen share must stay until this program has started, even if the tenant's previous program ends before
        self._launches(caller, tenant)

    def _launches(self, caller: Caller, tenant: Tenant) -> None:
        key = processes.key_of(caller.peer.pid)
        tenant.launching, tenant.launcher = True, key if key.start_ticks else None
        caller.registered.append(tenant.name)

    async def _prepare_change(self, tenant: Tenant, spec: TenantSpec) -> None:
        """Let the tenant's mechanism prepare a changed share in a thread, because an MPS daemon may answer late."""
        mechanism = self._registry.preparing_change(tenant, spec)
        if mechanism is None:
            return
        await asyncio.to_thread(mechanism.prepare, spec, tenant.gpus)
        if self._registry.tenants.get(tenant.name) is not tenant:
            mechanism.settle(spec, tenant.gpus)
            raise InputError(f"tenant {tenant.name} has ended", field="NAME")

    async def started(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """Record that a launcher has started a tenant's program, and the program's pid."""
        tenant = self._find(order)
        self._check_user(caller, tenant)
        pid = order.get("pid")
        key = processes.key_of(pid if isinstance(pid, int) and pid > 0 else 0)
        # the flag stays as it is if the program has joined a tenant that another launcher registered
        if tenant.name in caller.registered or self._lives.awaits(tenant, processes.key_of(caller.peer.pid)):
            tenant.launching, tenant.launcher = False, None
        if key.start_ticks == 0 or caller.peer.pid not in processes.ancestors(key.pid):
            # `stop` will signal this process and its descendants, so the process must belong to the caller
            self._lives.maybe_remove(tenant)
            return {"error": f"process {pid} was not started by process {caller.peer.pid}", "kind": "work"}
        if tenant.root is None:
            self._lives.set_root(tenant, key)
        if tenant.held is None and not tenant.held_not:
            await self._lives.starts(tenant, key.pid)
        self._save()
        return {"ok": True}

    async def set_share(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """Change a tenant's share, memory limit, priority or weights."""
        tenant = self._find(order)
        if not caller.trusted:
            raise InputError(f"user {caller.peer.uid} may not change shares on this agent")
        changes = {key: _number(order, key) for key in SETTABLE if order.get(key) is not None}
        if not changes:
            raise InputError(f"nothing to change: give one of {', '.join(SETTABLE)}")
        await self._prepare_change(tenant, dataclasses.replace(tenant.spec, **changes))
        tenants = self._rows.in_force.config.tenants if tenant.declared else ()
        declared = next((spec for spec in tenants if spec.name == tenant.name), None)
        spec, by_hand = changed_by_hand(tenant.spec, declared, tenant.by_hand, changes)
        when = self._lives.change(tenant, spec)
        tenant.by_hand = by_hand
        now = {key: getattr(tenant.spec, key) for key in SETTABLE}
        return {"name": tenant.name, "holds": when, **now, "set_by_hand": by_hand_rows(tenant.spec, by_hand)}

    async def colocation(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """Change the co-location settings that the order names; return all settings and the latency-sensitive
        processes. With `while_connected` the change is undone when the caller's connection closes.
        """
        floors = self._floors
        lent = order.pop("while_connected", False) is True
        changes = {key: value for key, value in order.items() if key != "op" and value is not None}
        if changes and not caller.trusted:
            raise InputError(f"user {caller.peer.uid} may not change the agent's co-location scheme")
        if changes:
            wanted = changed(floors.settings, changes)
            if lent:
                caller.undo.append(floors.lend(wanted))
            else:
                floors.configure(wanted)
        return floors.status()

    async def stop(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """End a tenant's processes: SIGTERM, and SIGKILL after `grace_s`. Answers when they have ended."""
        tenant = self._find(order)
        self._check_user(caller, tenant)
        grace_s = _seconds(order, "grace_s", 10.0)
        patience = time.monotonic() + STARTING_S
        # wait while the launcher is about to start the tenant's program
        while tenant.launching and time.monotonic() < patience:
            await asyncio.sleep(0.02)
        # this search also finds daemons that have not used the GPU yet and are therefore unknown to the agent
        found = await asyncio.to_thread(by_token, [tenant.token])
        keys = await kill(tenant, grace_s, found.get(tenant.token, frozenset()))
        deadline = time.monotonic() + grace_s + 5.0
        while any(processes.alive(key) for key in keys) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        left = [key.pid for key in keys if processes.alive(key)]
        held = "" if left or tenant.owner is None else await self._release(tenant)
        return {"name": tenant.name, "stopped": len(keys) - len(left), "left": left, "held": held}

    def launcher_gone(self, caller: Caller) -> None:
        """Called when a launcher's control connection has closed: remove the tenants that the launcher registered and
        whose programs it has not started.
        """
        for name in caller.registered:
            tenant = self._registry.tenants.get(name)
            if tenant is not None and tenant.launching:
                tenant.launching, tenant.launcher = False, None
                self._lives.maybe_remove(tenant)

    # -- checks ----------------------------------------------------------------------------------------------------

    def _find(self, order: dict[str, Any]) -> Tenant:
        name = order.get("name")
        tenant = self._registry.tenants.get(name) if isinstance(name, str) else None
        if tenant is None:
            known = ", ".join(list(self._registry.tenants)[:20]) or "none"
            raise InputError(f"there is no tenant {name!r}; there are: {known}", field="NAME")
        return tenant

    def _check_user(self, caller: Caller, tenant: Tenant) -> None:
        if not caller.trusted and caller.peer.uid != tenant.uid:
            raise InputError(f"tenant {tenant.name} belongs to another user")


def _number(order: dict[str, Any], key: str) -> Any:
    """A number from an order; it must be an integer for memory_bytes and priority. Raises InputError otherwise."""
    value = order[key]
    whole = key in ("memory_bytes", "priority")
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise InputError(f"{key} is {str(value)[:40]!r}, which is not a {'whole ' if whole else ''}number", field=key)
    return value


def _seconds(order: dict[str, Any], key: str, default: float) -> float:
    """A duration from an order in seconds: 0 s to one year. Raises InputError otherwise."""
    value = order.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= YEAR_S:
        raise InputError(
            f"{key} is {str(value)[:40]!r}, which is not a number of seconds from 0 to one year",
            field=key,
        )
    return float(value)
