"""What can be asked of a running agent over its control socket."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from cotenant.agent import processes
from cotenant.agent.config.colocation import changed
from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc.control import Caller, Handler
from cotenant.agent.ipc.page import counters as counters_of
from cotenant.agent.memory.orders import MemoryOrders
from cotenant.agent.memory.residency_row import residency_row
from cotenant.agent.owners.holding import Holding
from cotenant.agent.tenants.orphans import by_token
from cotenant.agent.tenants.registry import Tenant, spec_from_dict
from cotenant.core.errors import InputError, WorkError
from cotenant.policy.colocation import scheme_named

if TYPE_CHECKING:
    from cotenant.agent.daemon import Agent

STARTING_S = 5.0  # how long `stop` waits for a program that is being started
YEAR_S = 366 * 86400.0


class Operations:
    """The orders of the control socket; each takes the caller and a JSON object and returns one."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    def table(self) -> dict[str, Handler]:
        """op -> what carries it out."""
        return {
            "status": self.status,
            "register": self.register,
            "started": self.started,
            "list": self.list_tenants,
            "set": self.set_share,
            "stop": self.stop,
            "mechanisms": self.mechanisms,
            "warnings": self.warnings,
            **MemoryOrders(self.agent).table(),
            "colocation": self.colocation,
            **Holding(self.agent).table(),
        }

    # -- looking ---------------------------------------------------------------------------------------------------

    async def status(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """The agent itself."""
        agent = self.agent
        return {
            "pid": os.getpid(),
            "folder": str(agent.folder),
            "uptime_s": (time.monotonic_ns() - agent.started_ns) / 1e9,
            "gpus": [self.gpu_row(uuid) for uuid in agent.registry.gpus],
            "discipline": agent.config.quota.discipline,
            "quota_ms": agent.config.quota.quota_ns / 1e6,
            "min_quota_ms": agent.config.quota.min_quota_ns / 1e6,
            "window_s": agent.config.quota.window_ns / 1e9,
            "fail": agent.config.fail,
            "turns": agent.turn_count,
            "connections": len(agent.server.sessions),
            "refused_connections": agent.server.refused_connections,
            "config_fault": agent.config_fault,
            "swap_memory": self.agent.registry.host.as_dict(),
            "colocation": agent.floors.settings.scheme,
            "trace_dropped": agent.trace.dropped if agent.trace else 0,
        }

    def gpu_row(self, uuid: str) -> dict[str, Any]:
        """A GPU with who holds it and what is promised, as `list` answers it."""
        agent = self.agent
        turn = agent.broker.turns.gpus[uuid].turn
        return agent.registry.gpus[uuid].as_dict() | {
            "holder": turn.account.name if turn else None,
            "memory_charged_bytes": agent.ledger.total_used(uuid),
            "promised": sum(t.spec.request for t in agent.registry.on_gpu(uuid)),
        }

    async def mechanisms(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """What each mechanism can do."""
        return {name: m.capabilities.as_dict() for name, m in self.agent.mechanisms.items()}

    async def list_tenants(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """Every tenant with what it asked for and what it got."""
        tenants = [self.tenant_row(t) for t in self.agent.registry.tenants.values()]
        programs = [parked.as_dict() for parked in self.agent.parking.parked.values() if parked.name.startswith("pid:")]
        return {"agent": await self.status(caller, order), "tenants": tenants, "parked": programs}

    def tenant_row(self, tenant: Tenant) -> dict[str, Any]:
        """A tenant with what it asked for and what it got, as `list` answers it."""
        spec = tenant.spec
        now_ns = time.monotonic_ns()
        counters = [counters_of(s.page.slots[slot]) for s in tenant.sessions for slot in s.slots]
        return {
            "name": tenant.name,
            "request": spec.request,
            "limit": spec.limit,
            "priority": spec.priority,
            "mechanism": spec.mechanism,
            "class": work_kind(spec),
            "oversubscribe": spec.oversubscribe,
            "declared": tenant.declared,
            "holder": tenant.holder._asdict() if tenant.holder else None,
            "state": self._state(tenant),
            "age_s": (now_ns - tenant.created_ns) / 1e9,
            "pids": sorted({s.peer.pid for s in tenant.sessions}),
            "root_pid": tenant.root.pid if tenant.root else None,
            "programs": sorted({s.program for s in tenant.sessions}),
            "gpus": [self._share(tenant, gpu.uuid, now_ns) for gpu in tenant.gpus],
            "launches": tenant.launches_gone + sum(c["launches"] for c in counters),
            "graph_launches": sum(c["graph_launches"] for c in counters),
            "copies": sum(c["copies"] for c in counters),
            "gate_wait_s": (tenant.waited_gone_ns + sum(c["waited_ns"] for c in counters)) / 1e9,
            "predicted_busy_s": sum(c["predicted_busy_ns"] for c in counters) / 1e9,
            "host_pinned_bytes": self.agent.host_used(tenant),
            "warnings": list(tenant.warnings),
            "warning_count": tenant.warning_count,
        }

    def _share(self, tenant: Tenant, uuid: str, now_ns: int) -> dict[str, Any]:
        agent = self.agent
        cap = tenant.spec.memory_bytes
        row: dict[str, Any] = {
            "uuid": uuid,
            "index": agent.registry.gpus[uuid].index,
            "memory_used_bytes": agent.ledger.used(tenant.name, uuid),
            "memory_limit_bytes": cap,
            "memory": agent.ledger.families(tenant.name, uuid),
            "got": None,
            "holding": False,
            "waiting": False,
            "turns": 0,
            "copies": agent.server.copies.row(tenant, uuid),
            "waited_s": 0.0,
            "held_s": 0.0,
            "overrun_s": 0.0,
            "floor": agent.floors.standing(uuid, work_kind(tenant.spec), self._pids(tenant)),
        }
        away = tenant.name in agent.residency.parked or tenant.name in agent.residency.counts
        if tenant.spec.oversubscribe != "none" or away:
            row["residency"] = residency_row(agent.residency, tenant, uuid)
        machine = agent.broker.turns.gpus[uuid]
        account = machine.accounts.get(tenant.name)
        if account is not None:
            account.window.trim(now_ns)
            turn_ns = account.turn_ns(now_ns)
            span_ns = min(account.window.window_ns, max(1, now_ns - tenant.created_ns))
            row |= {
                "got": min(1.0, (account.window.held_ns + turn_ns) / span_ns),
                "holding": machine.turn is not None and machine.turn.account is account,
                "waiting": account.waiting,
                "turns": account.turns + (1 if turn_ns else 0),
                "waited_s": (account.waited_ns + (now_ns - account.requested_ns if account.waiting else 0)) / 1e9,
                "held_s": account.held_so_far_ns(now_ns) / 1e9,
                "overrun_s": account.overrun_ns / 1e9,
            }
        return row

    @staticmethod
    def _pids(tenant: Tenant) -> set[int]:
        """Its processes on the GPU, and the one it was started with: a worker that only takes time has no session."""
        return {s.peer.pid for s in tenant.sessions} | ({tenant.root.pid} if tenant.root else set())

    def _state(self, tenant: Tenant) -> str:
        if tenant.name in self.agent.parking.parked:
            return "parked"
        if tenant.launching:
            return "starting"
        if tenant.sessions:
            return "running"
        if tenant.holder and not tenant.root:
            return "held"
        return "declared" if tenant.declared and not tenant.root else "no GPU yet"  # also what a program left behind

    async def warnings(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """What was noticed about a tenant, also when it has just ended."""
        name = str(order.get("name"))
        tenant = self.agent.registry.tenants.get(name)
        return {"warnings": list(tenant.warnings) if tenant else self.agent.departed.get(name, [])}

    # -- doing -----------------------------------------------------------------------------------------------------

    async def register(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """Admit a tenant for a launcher, or hand out a declared tenant's token. Answers with the program's environment.

        A declared tenant has the agent's limits; a launcher that brings its own is refused.
        """
        agent = self.agent
        given = order.get("tenant")
        if not isinstance(given, dict) or not given.get("name"):
            raise InputError("a tenant needs a name", field="--name")
        spec = spec_from_dict(given)
        existing = agent.registry.tenants.get(spec.name)
        if existing is not None and (existing.declared or existing.holder):
            if any(given.get(key) for key in ("request", "memory_bytes", "weight")) or given.get("limit") is not None:
                origin = "held for its job" if existing.holder else "declared in the agent's configuration"
                raise InputError(
                    f"{spec.name} is {origin} and has its share from there: leave out --request, --limit and --memory",
                    field="--name",
                )
            self._check_user(caller, existing)
            tenant = existing
            if not tenant.sessions and tenant.root is None:
                tenant.warnings.clear()  # they are of the run before
        elif existing is not None and order.get("join"):
            self._check_user(caller, existing)
            tenant = existing
        else:
            if existing is not None:
                raise InputError(
                    f"a tenant named {spec.name} is running; choose another name, or --join to share its budget",
                    field="--name",
                )
            if order.get("join"):  # a name with a slip in it would otherwise be a tenant without bounds
                self._find({"name": spec.name})
            if not caller.trusted:
                raise InputError(f"user {caller.peer.uid} may only start tenants declared in the agent's configuration")
            timeout_s = None if order.get("timeout_s") is None else _seconds(order, "timeout_s", 0.0)
            tenant = await self._admit(spec, caller)
            tenant.launching = True
            tenant.timeout_s = timeout_s
            caller.registered.append(tenant.name)
        agent.save()
        environment = tenant.environment(below=scheme_named(agent.floors.settings.scheme).be_below)
        environment.setdefault("CUDA_VISIBLE_DEVICES", ",".join(gpu.uuid for gpu in tenant.gpus))
        return {
            "name": tenant.name,
            "token": tenant.token,
            "socket": str(agent.server.path),
            "soft": any(gpu.soft for gpu in tenant.gpus),
            "parked": tenant.name in agent.parking.parked,
            "gpus": [gpu.as_dict() for gpu in tenant.gpus],
            "environment": environment,
        }

    async def _admit(self, spec: TenantSpec, caller: Caller) -> Tenant:
        """A new tenant; what its mechanism needs first is started beside the turns of the others."""
        ahead = self.agent.registry.preparing(spec)
        if ahead is not None:
            mechanism, gpus = ahead
            await asyncio.to_thread(mechanism.prepare, gpus)
        try:
            return self.agent.add_tenant(spec, caller.peer.uid)
        except (InputError, WorkError):
            if ahead is not None:
                ahead[0].settle(ahead[1])
            raise

    async def started(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """A launcher has started the program of a tenant."""
        tenant = self._find(order)
        self._check_user(caller, tenant)
        pid = order.get("pid")
        key = processes.key_of(pid if isinstance(pid, int) and pid > 0 else 0)
        if tenant.name in caller.registered:  # not by a program that joins: its end would end the tenant
            tenant.launching = False
        if key.start_ticks == 0 or caller.peer.pid not in processes.ancestors(key.pid):
            # `stop` signals that process and all below it: it must be the caller's own
            self.agent.maybe_remove(tenant)
            return {"error": f"process {pid} is not one that process {caller.peer.pid} has started", "kind": "work"}
        if tenant.root is None:
            self.agent.set_root(tenant, key)
        self.agent.save()
        return {"ok": True}

    async def set_share(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """Change a tenant's share."""
        tenant = self._find(order)
        if not caller.trusted:
            raise InputError(f"user {caller.peer.uid} may not change shares on this agent")
        allowed = ("request", "limit", "memory_bytes", "priority", "weight", "copy_weight")
        changes = {key: _number(order, key) for key in allowed if order.get(key) is not None}
        if not changes:
            raise InputError(f"nothing to change: give one of {', '.join(allowed)}")
        when = self.agent.change_tenant(tenant, dataclasses.replace(tenant.spec, **changes))
        return {"name": tenant.name, "holds": when, **{k: getattr(tenant.spec, k) for k in allowed}}

    async def colocation(self, caller: Caller, order: dict[str, Any]) -> dict[str, Any]:
        """The floor's settings and who is there, after changing what the order names; `while_connected`: until the
        caller's connection ends."""
        floors = self.agent.floors
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
        """End a tenant's processes: SIGTERM, after `grace_s` SIGKILL. Answers once they have ended."""
        tenant = self._find(order)
        self._check_user(caller, tenant)
        grace_s = _seconds(order, "grace_s", 10.0)
        patience = time.monotonic() + STARTING_S
        while tenant.launching and time.monotonic() < patience:  # its program is about to be there
            await asyncio.sleep(0.02)
        found = await asyncio.to_thread(by_token, [tenant.token])  # daemons that have not used the GPU yet
        keys = self.kill(tenant, grace_s, found.get(tenant.token, frozenset()))
        deadline = time.monotonic() + grace_s + 5.0
        while any(processes.alive(key) for key in keys) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        left = [key.pid for key in keys if processes.alive(key)]
        return {"name": tenant.name, "stopped": len(keys) - len(left), "left": left}

    def kill(
        self, tenant: Tenant, grace_s: float, more: frozenset[processes.ProcessKey] = frozenset()
    ) -> set[processes.ProcessKey]:
        """Send SIGTERM to a tenant's program and processes now, SIGKILL to those left after `grace_s`."""
        keys = {s.process for s in tenant.sessions if s.process.start_ticks}
        if tenant.root is not None:
            keys.add(tenant.root)
        keys |= tenant.heirs | more
        keys |= processes.descendants(keys)
        # the program first: one that waits for its children would end by itself, as if it had been done
        for key in sorted(keys, key=lambda key: key != tenant.root):
            _signal(key, signal.SIGTERM, group=key == tenant.root)
        if tenant.group is not None:
            _signal_group(tenant.group, signal.SIGTERM)

        def finish() -> None:
            for key in keys | processes.descendants(keys):
                _signal(key, signal.SIGKILL, group=key == tenant.root)
            if tenant.group is not None:
                _signal_group(tenant.group, signal.SIGKILL)

        asyncio.get_running_loop().call_later(grace_s, finish)
        return keys

    # -- checks ----------------------------------------------------------------------------------------------------

    def _find(self, order: dict[str, Any]) -> Tenant:
        name = order.get("name")
        tenant = self.agent.registry.tenants.get(name) if isinstance(name, str) else None
        if tenant is None:
            known = ", ".join(list(self.agent.registry.tenants)[:20]) or "none"
            raise InputError(f"there is no tenant {name!r}; there are: {known}", field="NAME")
        return tenant

    def _check_user(self, caller: Caller, tenant: Tenant) -> None:
        if not caller.trusted and caller.peer.uid != tenant.uid:
            raise InputError(f"tenant {tenant.name} belongs to another user")


def work_kind(spec: TenantSpec) -> str:
    """How a tenant stands to the others on its GPU."""
    return "best-effort" if spec.best_effort else "latency-sensitive" if spec.latency_sensitive else "normal"


def _number(order: dict[str, Any], key: str) -> Any:
    """A number of an order, whole where the share wants it whole. InputError when it is something else."""
    value = order[key]
    whole = key in ("memory_bytes", "priority")
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise InputError(f"{key} is {str(value)[:40]!r}, which is not a {'whole ' if whole else ''}number", field=key)
    return value


def _seconds(order: dict[str, Any], key: str, default: float) -> float:
    """A time of an order, 0 s to a year. InputError when it is something else."""
    value = order.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= YEAR_S:
        raise InputError(f"{key} is {str(value)[:40]!r}, which is not a time of 0 s to a year", field=key)
    return float(value)


def _signal_group(group: int, number: int) -> None:
    """Signal the processes that a program has left behind in its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _signal(key: processes.ProcessKey, number: int, *, group: bool) -> None:
    """Signal that very process, and its whole group where the launcher gave it one."""
    if not processes.alive(key):
        return
    try:
        if group and os.getpgid(key.pid) == key.pid:
            os.killpg(key.pid, number)
        else:
            os.kill(key.pid, number)
    except (ProcessLookupError, PermissionError):
        return
