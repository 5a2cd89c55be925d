"""Checks that each tenant has its share: its processes are clients of the right MPS server and see no more SMs than the
share allows.

A program that leaves its MPS server has the whole GPU without any error; such deviations are detected here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping

from cotenant.agent import processes
from cotenant.agent.audit.processes import using
from cotenant.agent.mechanisms.base import Mechanism
from cotenant.agent.mechanisms.mps_control import PERCENTAGE
from cotenant.agent.mechanisms.proof import Look
from cotenant.agent.processes import ProcessKey
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import Tenant
from cotenant.core.errors import WorkError
from cotenant.core.strength import NOT_ENFORCED

LOOK_EVERY_S = 0.5
# If a process on a GPU is no client of its MPS server in this many checks, the agent warns about it. Before that, it
# may still be connecting.
LOOKS = 2
# The number of checks for a process whose use of the GPU is known from its shim only, not yet from the driver. It is
# larger, because the shim tells the agent about a context early: the MPS server may still be starting then, and accepts
# the process as a client later.
LOOKS_BY_SHIM = 10
# a deviation is reported for this long after the agent has corrected it, so that it appears in the metrics
NAMED_S = 30.0
PATIENCE_S = 5.0  # time for the MPS control daemon to answer
AGAIN = "start it again with the environment that cotenant run gives"
LOWERED = "the limit was lowered after it started, and holds for processes that start from now on: start it again"


class ShareProof:
    """Checks that each tenant has its share, by the client lists of MPS servers, and that memory limits hold. Records
    deviations in `Tenant.not_enforced`.
    """

    def __init__(
        self,
        registry: Registry,
        tenant_of: Callable[[int], Tenant | None],
        memory: Callable[[Tenant], list[str]] = lambda tenant: [],
    ) -> None:
        """`tenant_of` returns the tenant of a process, whether it is connected to the agent or not. `memory` returns
        the reasons why a tenant's memory limit may not hold.
        """
        self._registry, self._tenant_of, self._memory = registry, tenant_of, memory
        # (UUID of the GPU, process) -> number of successive checks that found the process outside its tenant's MPS
        # server
        self._outside: dict[tuple[str, ProcessKey], int] = {}
        self._put_right: dict[tuple[str, str], float] = {}
        # mechanisms whose MPS daemon has not answered yet
        self._asking: dict[str, asyncio.Future[tuple[Look | None, dict[str, list[int]]]]] = {}

    async def run(self, warned: Callable[[Tenant, str], None]) -> None:
        """Check all tenants as long as the agent runs; `warned` is called with each new deviation."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            found: dict[str, list[str]] = defaultdict(list)
            for mechanism in self._registry.mechanisms.values():
                tenants = [t for t in self._registry.tenants.values() if t.spec.mechanism == mechanism.name]
                if not tenants:
                    continue
                try:
                    look, running = await self._answer(mechanism)
                except WorkError as error:
                    for tenant in tenants:
                        found[tenant.name].append(f"whether the tenant's share is enforced is not known: {error}")
                    continue
                if look is not None:
                    for name, texts in self.judge(look, running).items():
                        found[name] += texts
            for tenant in list(self._registry.tenants.values()):
                for text in self.take(tenant, [*found.get(tenant.name, ()), *self._memory(tenant)]):
                    warned(tenant, f"{NOT_ENFORCED}: {text}")

    async def _answer(self, mechanism: Mechanism) -> tuple[Look | None, dict[str, list[int]]]:
        """Return what the mechanism's MPS servers and the GPUs' drivers report about processes. Raises WorkError if
        they do not answer in time.
        """
        asking = self._asking.pop(mechanism.name, None)
        asking = asking or asyncio.ensure_future(asyncio.to_thread(self._ask, mechanism))
        if not (await asyncio.wait({asking}, timeout=PATIENCE_S))[0]:
            self._asking[mechanism.name] = asking
            raise WorkError(f"the MPS control daemon has not answered for {PATIENCE_S:g} s")
        return asking.result()

    def _ask(self, mechanism: Mechanism) -> tuple[Look | None, dict[str, list[int]]]:
        look = mechanism.look()
        return look, using(list(self._registry.gpus.values())) if look is not None else {}

    @staticmethod
    def take(tenant: Tenant, texts: Iterable[str]) -> list[str]:
        """Record the current deviations of a tenant's share with their start times; returns the new ones."""
        before = tenant.not_enforced
        tenant.not_enforced = {text: before.get(text, time.monotonic_ns()) for text in texts}
        return [text for text in tenant.not_enforced if text not in before]

    def judge(self, look: Look, running: Mapping[str, Iterable[int]]) -> dict[str, list[str]]:
        """Deviations from each tenant's share, as sentences that say what to do. `running`: processes on each GPU."""
        found: dict[str, list[str]] = defaultdict(list)
        tenants = {name: self._registry.tenants[name] for name in look.places if name in self._registry.tenants}
        clients = {client.pid for client in look.clients}
        outside: dict[tuple[str, ProcessKey], int] = {}
        for uuid, pid, tenant in self._on_gpus(tenants, running):
            if pid in clients:
                continue
            key = (uuid, processes.key_of(pid))
            if not processes.alive(key[1]):
                continue
            outside[key] = self._outside.get(key, 0) + 1
            # a process that sees more SMs than its share is not about to become a client, so it is reported at once
            beyond = _beyond(tenant, uuid, pid)
            if beyond or outside[key] >= (LOOKS if pid in running.get(uuid, ()) else LOOKS_BY_SHIM):
                found[tenant.name].append(self._escaped(uuid, pid, beyond))
        self._outside = outside
        escaped = {key.pid for _, key in outside}
        for client in sorted(look.clients):
            owner = self._owner(client.pid)
            if owner is not None and owner.name in tenants and client.place != look.places[owner.name]:
                mine = look.places[owner.name]
                found[owner.name].append(f"process {client.pid} is in {client.place}, not in {mine}: {AGAIN}")
            if owner is not None and owner.name in tenants and (text := self._raised(owner, client.pid)):
                found[owner.name].append(text)
        for name, tenant in tenants.items():
            found[name] += _sms_seen(tenant, escaped)
        now = time.monotonic()
        for name, text in look.put_right.items():
            by = "a program with access to the MPS server did this; keep the server's sockets out of its container"
            todo = "restart the tenant's programs that started while it was wrong"
            self._put_right[(name, f"{text} ({by}); {todo}")] = now
        self._put_right = {key: at for key, at in self._put_right.items() if now - at < NAMED_S}
        for name, text in self._put_right:
            found[name].append(text)
        return found

    def _on_gpus(
        self, tenants: Mapping[str, Tenant], running: Mapping[str, Iterable[int]]
    ) -> Iterable[tuple[str, int, Tenant]]:
        """GPU, pid and tenant of each tenant's process that uses a GPU, according to the driver or the process's shim.
        """
        seen = {
            (uuid, session.peer.pid): tenant
            for tenant in tenants.values()
            for session in tenant.sessions
            for slot, uuid in session.slots.items()
            # a process without a CUDA context only queries the GPU, so it is not checked
            if session.page.slots[slot].contexts
        }
        for uuid, pids in running.items():
            for pid in pids:
                owner = seen.get((uuid, pid)) or self._owner(pid)
                if owner is not None and owner.name in tenants:
                    seen[(uuid, pid)] = owner
        return [(uuid, pid, owner) for (uuid, pid), owner in sorted(seen.items(), key=lambda item: item[0])]

    def _owner(self, pid: int) -> Tenant | None:
        return self._registry.by_connection(pid) or self._tenant_of(pid)

    def _raised(self, tenant: Tenant, pid: int) -> str:
        """A sentence about a client that was started with a larger percentage of the SMs than its tenant has; empty if
        it was not. Under version 2 of the MPS control protocol, a client has the percentage that is in its environment.
        """
        given = tenant.enforcement.environment.get(PERCENTAGE)
        text = processes.variable(pid, PERCENTAGE) if given is not None else None
        if given is None or text is None:
            return ""
        with contextlib.suppress(ValueError):
            if 0 < float(text or 100) <= float(given) + 0.01:
                return ""
        return f"process {pid} started with {PERCENTAGE}={text or '(unset)'}, its share has at most {given}: {AGAIN}"

    def _escaped(self, uuid: str, pid: int, beyond: str) -> str:
        index = self._registry.gpus[uuid].index
        return (
            f"process {pid} uses GPU {index} outside its MPS server and may use the whole GPU{beyond}: {AGAIN}; "
            f"nvidia-smi -i {index} -c EXCLUSIVE_PROCESS prevents use of the GPU outside MPS servers"
        )


def _beyond(tenant: Tenant, uuid: str, pid: int) -> str:
    """Return text that says how many SMs of a GPU a process sees, if its tenant may have fewer; otherwise empty."""
    given = tenant.enforcement.sms.get(uuid)
    for session in tenant.sessions:
        for slot, sms in session.sms.items():
            if session.peer.pid == pid and session.slots.get(slot) == uuid and given and 0 < given.at_most < sms:
                return f" (it sees {sms} SMs, its share has at most {given.at_most})"
    return ""


def _sms_seen(tenant: Tenant, escaped: Collection[int]) -> list[str]:
    """A sentence for each process that sees more SMs than its tenant may have, or fewer than are reserved for it.
    `escaped`: pids of processes that are left out, because it is already reported that they are no clients of a server.
    """
    texts = []
    for session in tenant.sessions:
        for slot, sms in session.sms.items():
            given = tenant.enforcement.sms.get(session.slots.get(slot, ""))
            if given is None or not sms or session.peer.pid in escaped:
                continue
            who = f"process {session.peer.pid} sees {sms} SMs"
            if given.at_most and sms > given.at_most:
                lowered = sms <= session.sms_given.get(slot, 0)
                texts.append(f"{who}, its share has at most {given.at_most}: {LOWERED if lowered else AGAIN}")
            elif sms < given.reserved:
                texts.append(f"{who}, {given.reserved} are reserved for it: {AGAIN}")
    return texts
