"""Detects processes that use the agent's GPUs without being connected to the agent.

Such a process runs without the shim, so no share limits it. It may belong to a tenant: the tenant is found by the
process's cgroup, its parents, or the token in its environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cotenant.agent import processes
from cotenant.agent.audit.neighbours import Neighbours
from cotenant.agent.owners.owners import Owners
from cotenant.agent.processes import ProcessKey
from cotenant.agent.tenants.places import Place
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import Tenant
from cotenant.devices.base import Gpu
from cotenant.devices.registry import device
from cotenant.native.libraries import DRIVER_SHIM

LOG = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0
# after a scan that found a new unconnected process, the next scan follows after this time, so that the process is
# reported within 2 s
LOOK_AGAIN_S = 0.5
# Beginning of the program names of the MPS daemon and the MPS servers. They are not reported, because they use the GPU
# for their clients. /proc truncates program names to 15 characters, so the rest of a name is not compared.
MPS = "nvidia-cuda-mps"
TOKEN = b"COTENANT_TOKEN="
SOCKET = b"COTENANT_SOCKET="
SHIM = DRIVER_SHIM.encode()
ONLY_ITS_OWN = "neither agent knows the shares of the other's tenants"
NOT_VOUCHED = "it was killed, because no running agent of root or of this agent's user reports it as a tenant's"
RESTART_S = 10.0  # an agent that is away for longer has ended: `cotenant run` waits as long for it


# the processes on each GPU that were not connected, and those of the previous agent's processes that may return
_Read = tuple[set[tuple[str, ProcessKey]], frozenset[ProcessKey]]


class Unseen(NamedTuple):
    """A process that uses a GPU without being connected. `tenant`: name of its tenant; empty if it has none. `place`:
    the pod or job in which it runs; None if it runs in none. `agent`: folder of the other agent whose tenant it is, or
    empty.
    """

    process: ProcessKey
    gpu: str
    program: str
    uid: int
    tenant: str
    place: Place | None = None
    agent: str = ""

    @property
    def how(self) -> str:
        """How the process uses the GPU, in words that follow the GPU's number."""
        return f"as a tenant of another agent ({self.agent})" if self.agent else "without the agent"

    def as_dict(self) -> dict[str, Any]:
        """The process in JSON types, as the operation `list` of the control socket reports it."""
        return {
            "pid": self.process.pid, "gpu": self.gpu, "program": self.program, "uid": self.uid,
            "tenant": self.tenant or None, "agent": self.agent or None,
            "holder": {"kind": self.place.kind, "id": self.place.id} if self.place else None,
        }  # fmt: skip


def using(gpus: Iterable[Gpu]) -> dict[str, list[int]]:
    """Pids of the processes on each GPU, keyed by the GPU's UUID, as the driver lists them."""
    by_kind: dict[str, list[str]] = {}
    for gpu in gpus:
        by_kind.setdefault(gpu.kind, []).append(gpu.uuid)
    found: dict[str, list[int]] = {}
    for kind, uuids in by_kind.items():
        found |= device(kind).processes(uuids)
    return found


def end(found: Unseen) -> None:
    """Kill the process, unless another one has taken over its pid."""
    fd = processes.pidfd(found.process)
    if fd is not None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        os.close(fd)


def _has_shim(proc: Path, key: ProcessKey) -> bool:
    """Return whether a process has loaded the shim. Also returns True if the agent may not read the process's memory
    map.
    """
    try:
        return SHIM in (proc / str(key.pid) / "maps").read_bytes()
    except PermissionError:
        return True
    except OSError:
        return False


class UnseenWatch:
    """Reports processes that use a GPU without being connected to the agent. A process is reported only when two
    successive scans have found it unconnected, because a process that has just started may still be connecting.
    """

    def __init__(
        self,
        registry: Registry,
        owners: Owners,
        proc: Path = Path("/proc"),
        in_group: Callable[[int], Tenant | None] = lambda pid: None,
        bring_back: Callable[[Tenant, int], bool] = lambda tenant, pid: False,
        own: Path | None = None,
        neighbours: Neighbours | None = None,
    ) -> None:
        """`in_group` is a function that returns the tenant in whose control group a process is, if the group has a
        memory limit. `bring_back` moves a process of a tenant into the tenant's group if the process is elsewhere;
        returns whether it was moved. `own`: the socket for the tenants of this agent. `neighbours`:
        the other agents of the machine.
        """
        self._own, self.neighbours = own, neighbours or Neighbours(Path(), ())
        self._vouched: dict[ProcessKey, float] = {}  # when another agent last reported a process as its tenant's
        self._in_group, self._bring_back = in_group, bring_back
        self._registry, self._owners, self._proc = registry, owners, proc
        self._before: set[tuple[str, ProcessKey]] = set()
        self.next_look_s = LOOK_EVERY_S
        self._returning: frozenset[ProcessKey] = frozenset()
        self.now: list[Unseen] = []

    def expect(self, known: Iterable[ProcessKey]) -> None:
        """Do not report these processes, although they are unconnected. They were connected to the previous agent, so
        they have the shim, and an idle process reconnects only when it uses the GPU again.
        """
        self._returning = frozenset(known)

    async def run(self, warned: Callable[[Tenant, str], None], *, strict: bool) -> None:
        """Report other agents of the GPUs, and unconnected processes that use them, as long as the agent runs. With
        `strict` kill these processes, except the tenants of the other agents.
        """
        while True:
            await asyncio.sleep(self.next_look_s)
            for text in await asyncio.to_thread(self.neighbours.look):
                LOG.warning(text)
            new = self._judge(*await asyncio.to_thread(self._look, self._connected(), self._returning))
            if strict and any(row.agent for row in self.now):
                self.vouch(await asyncio.to_thread(self.neighbours.tenants), time.monotonic())
            for row in new:
                what = f"process {row.process.pid} ({row.program}, user {row.uid}) uses GPU"
                tenant = self._registry.tenants.get(row.tenant)
                moved = tenant is not None and self._bring_back(tenant, row.process.pid)
                limit = "no limit except on memory" if self._in_group(row.process.pid) else "no limit"
                fate = ONLY_ITS_OWN if row.agent else f"{limit} applies to it"
                if strict and not self.spared(row):
                    fate = NOT_VOUCHED if row.agent else "it was killed"
                text = f"{what} {self._registry.gpus[row.gpu].index} {row.how}: {fate}"
                if moved:
                    text += "; it was outside the tenant's control group, and what it allocated there is not counted"
                if tenant is not None:
                    warned(tenant, text)
                else:
                    LOG.warning(text if row.agent else f"{text}; it belongs to no tenant")
            for row in self.now if strict else ():
                if not self.spared(row):
                    end(row)

    def spared(self, row: Unseen) -> bool:
        """Return whether `--strict` leaves a process alone, because another agent reports it as its tenant's."""
        return row.process in self._vouched

    def vouch(self, pids: Collection[int], now_s: float) -> None:
        """Spare the processes with these pids, and those that an earlier call named up to RESTART_S before `now_s`:
        their agent may be restarting.
        """
        mine = {row.process for row in self.now if row.agent}
        lasting = {key: at for key, at in self._vouched.items() if key in mine and now_s - at < RESTART_S}
        self._vouched = lasting | {key: now_s for key in mine if key.pid in pids}

    def look(self, running: Mapping[str, Iterable[int]]) -> list[Unseen]:
        """Find the unconnected processes in `running`, the pids on each GPU. Returns those that no earlier scan has
        reported.
        """
        return self._judge(*self._read(running, self._connected(), self._returning))

    def _connected(self) -> set[int]:
        return {session.peer.pid for tenant in self._registry.tenants.values() for session in tenant.sessions}

    def _look(self, connected: Collection[int], returning: Iterable[ProcessKey]) -> _Read:
        """Read in a thread what `_judge` needs, because the event loop also switches tenants."""
        return self._read(using(list(self._registry.gpus.values())), connected, returning)

    def _read(
        self, running: Mapping[str, Iterable[int]], connected: Collection[int], returning: Iterable[ProcessKey]
    ) -> _Read:
        mine = {os.getpid(), *connected}
        # a program that replaces itself (exec) keeps its pid and start time, but not the shim
        expected = frozenset(key for key in returning if key.pid not in mine and _has_shim(self._proc, key))
        there = {
            (gpu, key)
            for gpu, pids in running.items()
            for key in map(processes.key_of, set(pids) - mine)
            if key.start_ticks and key not in expected
        }
        return there, expected

    def _judge(self, there: set[tuple[str, ProcessKey]], expected: frozenset[ProcessKey]) -> list[Unseen]:
        """Find the unconnected processes among those that were read. Processes may have connected meanwhile."""
        connected = self._connected()
        there = {(gpu, key) for gpu, key in there if key.pid not in connected}
        self._returning = frozenset(key for key in expected if key.pid not in connected)
        known = {(row.gpu, row.process): row for row in self.now}
        named = [known.get(one) or self._named(*one) for one in sorted(there & self._before)]
        self.next_look_s = LOOK_AGAIN_S if there - self._before else LOOK_EVERY_S
        self._before = there
        self.now = [row for row in named if not row.program.startswith(MPS)]
        return [row for row in self.now if (row.gpu, row.process) not in known]

    def _named(self, gpu: str, key: ProcessKey) -> Unseen:
        folder = self._proc / str(key.pid)
        program, uid = "?", -1
        with contextlib.suppress(OSError):
            program = (folder / "comm").read_text(errors="replace").strip()
            uid = folder.stat().st_uid
        tenant = self.tenant_of(key.pid)
        agent = "" if tenant else self._other_agent(key)
        return Unseen(key, gpu, program, uid, tenant.name if tenant else "", self._owners.locate(key.pid), agent)

    def _other_agent(self, key: ProcessKey) -> str:
        """Folder of another agent as whose tenant a process was started; empty if the process runs without the shim."""
        variables = self._environment(key.pid) if _has_shim(self._proc, key) else []
        name = next((v.removeprefix(SOCKET) for v in variables if v.startswith(SOCKET)), b"")
        socket = Path(os.fsdecode(name))
        return str(socket.parent) if name and socket != self._own else ""

    def _environment(self, pid: int) -> list[bytes]:
        try:
            return processes.environment(pid, self._proc)
        except OSError:
            return []

    def tenant_of(self, pid: int) -> Tenant | None:
        """Find the tenant to which a process belongs, by its cgroup, its parents or its environment."""
        place = self._owners.locate(pid)
        if place is not None and (mine := self._owners.of(place.kind, place.id)):
            by_id = [t for t in mine if t.owner and place.container_id and t.owner.container_id == place.container_id]
            return (by_id or mine)[0]
        if (by_group := self._in_group(pid)) is not None:
            return by_group
        by_parents = self._registry.by_process(processes.ancestors(pid))
        if by_parents is not None:
            return by_parents
        token = next((v.removeprefix(TOKEN) for v in self._environment(pid) if v.startswith(TOKEN)), b"")
        return self._registry.by_token(token.decode(errors="replace")) if token else None
