"""State of the agent, its GPUs and tenants as plain data, for the orders `status` and `list`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotenant.agent.audit.processes import UnseenWatch
from cotenant.agent.config.by_hand import by_hand_rows
from cotenant.agent.config.files import InForce
from cotenant.agent.control.shortfalls import Shortfalls
from cotenant.agent.copies.links import Copies
from cotenant.agent.gate.floor import Floors
from cotenant.agent.ipc.page import counters as counters_of
from cotenant.agent.mechanisms.mps_prospects import MpsHere, find_mps
from cotenant.agent.mechanisms.prospects import Found, row_of, strongest, under
from cotenant.agent.mechanisms.slices import Slices
from cotenant.agent.memory.ledger import HOST, Ledger
from cotenant.agent.memory.parked import ParkedTable
from cotenant.agent.memory.residents import Residents
from cotenant.agent.memory_limits.enforcer import MemoryLimits
from cotenant.agent.shims.server import ShimServer
from cotenant.agent.slices.enforcer import SliceEnforcer
from cotenant.agent.tenants.host_memory import HostMemory
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import Tenant, work_kind
from cotenant.agent.turns.broker import Broker
from cotenant.agent.turns.history import History
from cotenant.core.strength import NOT_ENFORCED
from cotenant.policy.shares.slice_settings import SliceSettings


@dataclass(frozen=True)
class Rows:
    """Describes the state of the agent's parts as plain data, without changing them."""

    folder: Path
    in_force: InForce
    registry: Registry
    host: HostMemory
    ledger: Ledger
    parked: ParkedTable
    residents: Residents
    broker: Broker
    copies: Copies
    slices: SliceEnforcer
    limits: MemoryLimits
    floors: Floors
    server: ShimServer
    history: History
    unseen: UnseenWatch
    shortfalls: Shortfalls
    started_ns: int

    def status(self) -> dict[str, Any]:
        """Describe the agent: its process, settings and GPUs."""
        config, trace = self.in_force.config, self.history.trace
        return {
            "pid": os.getpid(),
            "folder": str(self.folder),
            "uptime_s": (time.monotonic_ns() - self.started_ns) / 1e9,
            "gpus": [self.gpu(uuid) for uuid in self.registry.gpus],
            "discipline": config.quota.discipline,
            "quota_ms": config.quota.quota_ns / 1e6,
            "min_quota_ms": config.quota.min_quota_ns / 1e6,
            "window_s": config.quota.window_ns / 1e9,
            "fail": config.fail,
            "turns": sum(self.history.turns.values()),
            "connections": len(self.server.sessions),
            "refused_connections": self.server.refused_connections,
            "config_fault": self.in_force.fault,
            "unseen": [row.as_dict() for row in self.unseen.now],
            "other_agents": self.unseen.neighbours.rows(),
            "swap_memory": self.host.as_dict(),
            "colocation": self.floors.settings.scheme,
            "trace_dropped": trace.dropped if trace else 0,
        }

    def gpu(self, uuid: str) -> dict[str, Any]:
        """Describe a GPU. `holder`: the tenant whose turn it is; `promised`: the sum of the tenants' requests; `auto`:
        the mechanism that `auto` means for a new tenant that keeps its memory.
        """
        turn = self.broker.turns.gpus[uuid].turn
        return self.registry.gpus[uuid].as_dict() | {
            "holder": turn.account.name if turn else None,
            "memory_charged_bytes": self.ledger.total_used(uuid),
            "promised": round(sum(t.spec.request for t in self.registry.on_gpu(uuid)), 9),
            "auto": self.registry.default_on(self.registry.gpus[uuid]),
        }

    def find_mps(self) -> dict[str, MpsHere]:
        """Find out what MPS could enforce on each GPU. Blocks while it runs commands, so call it in a thread."""
        return {uuid: find_mps(gpu, self.folder) for uuid, gpu in self.registry.gpus.items()}

    def promises(self, mps: Mapping[str, MpsHere]) -> list[dict[str, Any]]:
        """Describe for each GPU what enforces the properties of a share: time, SMs, memory, bandwidth and isolation of
        faults. `promises` has this for the mechanisms of the GPU's tenants, or for the default mechanism if it has
        none. `prospects` has the mechanism that would enforce each property most strongly on this GPU. `mps`: the
        result of `find_mps`.
        """
        rows = []
        slices = self.registry.mechanisms[Slices.name]
        assert isinstance(slices, Slices)
        for gpu in self.registry.gpus.values():
            refused = slices.refused.get(gpu.uuid) or slices.refusal(gpu)
            found = Found(self.limits.prospect(gpu), mps[gpu.uuid], refused, self.copies.is_on(gpu.uuid))
            there = self.registry.on_gpu(gpu.uuid)
            named = {tenant.spec.mechanism for tenant in there} or {self.registry.default_on(gpu)}
            promises = [row_of(name, each) for name in sorted(named) for each in under(name, found)]
            prospects = [row_of(*each) for each in strongest(found)]
            name = {"uuid": gpu.uuid, "index": gpu.index, "name": gpu.name}
            rows.append({**name, "promises": promises, "prospects": prospects})
        return rows

    def tenant(self, tenant: Tenant) -> dict[str, Any]:
        """Describe a tenant with its requested and received share."""
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
            "fail": self.registry.fail_mode(tenant, self.in_force.config.fail).name.lower(),
            "set_by_hand": by_hand_rows(spec, tenant.by_hand),
            "holder": tenant.owner._asdict() if tenant.owner else None,
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
            "host_pinned_bytes": self.ledger.used(tenant.name, HOST),
            "warnings": list(tenant.warnings),
            "warning_count": tenant.warning_count,
            "not_enforced": [{"text": t, "for_s": (now_ns - ns) / 1e9} for t, ns in tenant.not_enforced.items()],
        }

    def _share(self, tenant: Tenant, uuid: str, now_ns: int) -> dict[str, Any]:
        held = self.limits.of(tenant, self.registry.gpus[uuid])
        row: dict[str, Any] = {
            "uuid": uuid,
            "index": self.registry.gpus[uuid].index,
            "memory_used_bytes": self.ledger.used(tenant.name, uuid),
            "memory_limit_bytes": tenant.spec.memory_bytes,
            "memory_by": held.by,
            "memory_why": held.why,
            "memory": self.ledger.families(tenant.name, uuid),
            "got": None,
            "measuring": False,
            "short_s": self.shortfalls.short_s(tenant, uuid, now_ns),
            "hour": self.shortfalls.hour(tenant, uuid),
            "holding": False,
            "waiting": False,
            "turns": 0,
            "sms": _sms(tenant, uuid),
            "copies": self.copies.row(tenant, uuid),
            "waited_s": 0.0,
            "held_s": 0.0,
            "overrun_s": 0.0,
            "floor": self.floors.standing(uuid, work_kind(tenant.spec), tenant.pids),
        }
        residency = self.residents.row(tenant, uuid)
        if residency is not None:
            row["residency"] = residency
        window_ns = 0
        if self.registry.sliced(tenant):
            window_ns = SliceSettings.window_ns
            row["got"] = self.slices.part(tenant, uuid)
        machine = self.broker.turns.gpus[uuid]
        account = machine.accounts.get(tenant.name)
        if account is not None:
            account.window.trim(now_ns)
            turn_ns = account.turn_ns(now_ns)
            window_ns = account.window.window_ns
            row |= {
                "got": min(1.0, (account.window.held_ns + turn_ns) / window_ns),
                "holding": machine.turn is not None and machine.turn.account is account,
                "waiting": account.waiting,
                "turns": account.turns + (1 if turn_ns else 0),
                "waited_s": account.waited_so_far_ns(now_ns) / 1e9,
                "held_s": account.held_so_far_ns(now_ns) / 1e9,
                "overrun_s": account.overrun_ns / 1e9,
            }
        if now_ns - tenant.created_ns < window_ns:
            # Limits hold over a whole window: in a part of it a tenant may have more. A restarted agent does not know
            # what its tenants had before.
            row |= {"got": None, "measuring": True}
        return row

    def _state(self, tenant: Tenant) -> str:
        if tenant.name in self.parked.rows:
            return "parked"
        if tenant.launching:
            return "starting"
        if tenant.not_enforced:
            return NOT_ENFORCED
        if tenant.sessions:
            return "running"
        if tenant.owner and not tenant.root:
            return "held"
        # a declared tenant whose program has ended is shown as "no GPU yet" while processes of it are left
        return "declared" if tenant.declared and not tenant.root else "no GPU yet"


def _sms(tenant: Tenant, uuid: str) -> dict[str, int] | None:
    """Return how many SMs of a GPU are reserved for a tenant, the most that its share allows, and the most that one of
    its processes sees (0: no process has connected); None if SMs are not limited.
    """
    given = tenant.enforcement.sms.get(uuid)
    if given is None:
        return None
    seen = [sms for session in tenant.sessions for slot, sms in session.sms.items() if session.slots.get(slot) == uuid]
    return given._asdict() | {"seen": max(seen, default=0)}
