"""The agent's side of the LS gate, at which best-effort launches wait while latency-sensitive (LS) work is active.

Each GPU has a gate page: shared memory with the flags of its LS processes and the settings of the gate. It also has a
wait-flag page with copies of the flags, for which streams of best-effort processes wait on the GPU. The agent passes
both over a socket to LS processes and to best-effort programs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cotenant.abi.floor import FLOOR_HOLDERS, KERNEL, FloorRole, RuleKind, WorkClass
from cotenant.abi.protocol import MESSAGE_BYTES
from cotenant.agent.config import kernel_table
from cotenant.agent.gate import page as floor_page
from cotenant.agent.gate.page import FloorPage
from cotenant.agent.gate.shares import Shares, slot_of
from cotenant.agent.ipc.listener import Listener
from cotenant.agent.processes import Peer, peer_of
from cotenant.agent.tenants.tenant import Tenant
from cotenant.devices.base import Clock, uuid_text
from cotenant.policy.colocation import APART, ColocationSettings, next_duty, scheme_named

LOG = logging.getLogger(__name__)

MAX_MEMBERS = 4096
JOIN_WITHIN_S = 5.0
MEND_S = 1.0
CLOCK_S = 0.05
# time that LS processes have to reconnect to a restarted agent; until then best-effort work stays limited
GRACE_S = 5.0
WORK_CLASSES = {
    "unknown": WorkClass.UNKNOWN,
    "memory": WorkClass.MEMORY,
    "compute": WorkClass.COMPUTE,
}


@dataclass(eq=False)
class Member:
    """A process that has joined the LS gate of a GPU. `holder`: index of the process's LS-activity flag on the gate
    page, if the process is latency-sensitive.
    """

    socket: socket.socket
    peer: Peer
    gpu: str = ""
    role: int = 0
    holder: int | None = None
    words: bool = False  # the process asked for the wait-flag page, so an LS process sets its flag there, too


class Floors:
    """All LS gates of a node, at which best-effort launches wait while latency-sensitive work is active. Runs in the
    agent's event loop.
    """

    def __init__(
        self,
        path: Path,
        gpus: Iterable[str],
        settings: ColocationSettings,
        tenant_of: Callable[[int], Tenant | None],
        in_container: Callable[[int], bool] = lambda pid: False,
        clock_of: Callable[[str], Clock | None] = lambda gpu: None,
    ) -> None:
        self.path = path
        self._in_container = in_container
        self.settings = settings
        self._own = settings  # the permanent settings, which apply unless a program has set temporary ones
        self._loans: list[ColocationSettings] = []
        self.pages = {uuid: FloorPage() for uuid in gpus}
        self.shares = {uuid: Shares() for uuid in self.pages}
        self._tenant_of = tenant_of
        self._members: set[Member] = set()
        self._listener: Listener | None = None
        self._grace = True
        self._mending: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._clock_of = clock_of
        self._clocks: dict[str, Clock | None] = {}
        self._reading: set[str] = set()  # GPUs whose clocks a thread reads now
        self._duty = dict.fromkeys(self.pages, 1.0)
        for page in self.pages.values():
            page.layout.present = 1
        self.configure(settings)

    def configure(self, settings: ColocationSettings) -> None:
        """Put other co-location settings into effect permanently, and discard all temporary settings."""
        self._own = settings
        self._loans.clear()
        self._put(settings)

    def _put(self, settings: ColocationSettings) -> None:
        self.settings = settings
        for gpu, page in self.pages.items():
            page.write(settings, settings.first_duty_cycle)
            self.shares[gpu].configure(settings)
        self._duty = dict.fromkeys(self.pages, settings.first_duty_cycle)
        if self._looking is not None:
            self._looking.cancel()
            self._look_at_clocks()

    def lend(self, settings: ColocationSettings) -> Callable[[], None]:
        """Put temporary co-location settings into effect. Returns a function that discards them: then the latest of the
        remaining temporary settings take effect, or the permanent ones if none remain.
        """
        self._loans.append(settings)
        self._put(settings)

        def back() -> None:
            self._loans = [loan for loan in self._loans if loan is not settings]
            if self.settings is settings:
                next_ = self._loans[-1] if self._loans else self._own
                LOG.info(
                    f"the co-location scheme is {next_.scheme} again: the program that had set {settings.scheme} "
                    "has ended"
                )
                self._put(next_)

        return back

    def standing(self, gpu: str, kind: str, pids: Collection[int]) -> str:
        """Return the state of a tenant at the LS gate of a GPU: "held off" if a best-effort tenant's launches wait,
        "holds" if the LS-activity flag of one of a latency-sensitive tenant's processes is set, otherwise "". `kind`:
        best-effort, latency-sensitive or normal; `pids`: the tenant's processes.
        """
        page = self.pages.get(gpu)
        if page is None or kind == "normal":
            return ""
        up = page.up(time.monotonic_ns())
        if kind == "best-effort":
            gated = scheme_named(self.settings.scheme).rule is not RuleKind.FREE and not self.settings.overlap
            here = any(m.role == FloorRole.BEST_EFFORT and m.gpu == gpu and m.peer.pid in pids for m in self._members)
            return "held off" if up and gated and here else ""
        return "holds" if any(m.holder in up and m.gpu == gpu and m.peer.pid in pids for m in self._members) else ""

    def listen(self, mode: int) -> None:
        """Open the socket through which processes join the gates."""
        self._listener = Listener(self.path, mode, self._take)
        asyncio.get_running_loop().call_later(GRACE_S, self._grace_over)
        self._mending = asyncio.get_running_loop().call_later(MEND_S, self.mend)
        self._look_at_clocks()

    def _look_at_clocks(self) -> None:
        """If the scheme lets best-effort work overlap latency-sensitive work, adapt the duty cycle of best-effort work
        to each GPU's clock.
        """
        loop = asyncio.get_running_loop()
        self._looking = loop.call_later(CLOCK_S if self._asked() else MEND_S, self._look_at_clocks)
        for gpu, page in self.pages.items() if self._asked() else ():
            readable = self._clocks.get(gpu) is not None or gpu not in self._clocks
            if page.layout.tenants and page.layout.present and readable and gpu not in self._reading:
                self._reading.add(gpu)
                # a thread waits for the driver, because the event loop also switches tenants
                read = loop.run_in_executor(None, self._read, gpu, self._clocks.get(gpu))
                read.add_done_callback(partial(self._has_read, gpu, page))

    def _asked(self) -> bool:
        return self.settings.clock > 0 and scheme_named(self.settings.scheme).rule is RuleKind.TIDAL

    def _read(self, gpu: str, card: Clock | None) -> tuple[Clock | None, float | OSError]:
        """Return an object that reads a GPU's clock (`card` if given; None if there is none), and what it read."""
        try:
            card = card or self._clock_of(gpu)
            return card, card.part() if card is not None else 1.0
        except OSError as error:
            return card, error

    def _has_read(self, gpu: str, page: FloorPage, read: asyncio.Future[tuple[Clock | None, float | OSError]]) -> None:
        if gpu in self._reading and not read.cancelled():  # otherwise the gates are closed
            self._reading.discard(gpu)
            if self._asked():  # the settings may have changed meanwhile
                self._follow(gpu, page, *read.result())

    def _follow(self, gpu: str, page: FloorPage, card: Clock | None, clock: float | OSError) -> None:
        """Set the fraction of the time for which best-effort work may run (its duty cycle) from the GPU's clock."""
        self._clocks[gpu] = card
        if card is None:
            LOG.warning(
                f"the SM clock of {gpu} cannot be read, so the duty cycle of best-effort work does not follow it"
            )
            return
        if isinstance(clock, OSError):
            LOG.warning(
                f"the SM clock of {gpu} can no longer be read, so best-effort work has no duty cycle now: {clock}"
            )
            self._clocks[gpu], clock = None, 1.0
            self._duty[gpu] = 1.0
        self._duty[gpu] = next_duty(self._duty[gpu], clock, self.settings.clock, self.settings.duty_cycle)
        page.layout.duty_cycle_permille = round(self._duty[gpu] * 1000)

    def mend(self) -> None:
        """Once a second, restore the fields of every gate page that belong to the agent."""
        self._mending = asyncio.get_running_loop().call_later(MEND_S, self.mend)
        for gpu, page in self.pages.items():
            holders = {m.holder: m.peer.pid for m in self._members if m.gpu == gpu and m.holder is not None}
            if page.mend(self.settings, self._duty[gpu], holders):
                LOG.warning(
                    f"a process overwrote settings on the gate page (LS gate) of {gpu}; the agent restored them"
                )
            self._count(gpu)

    def _grace_over(self) -> None:
        self._grace = False
        for gpu in self.pages:
            self._count(gpu)

    def _take(self, connection: socket.socket) -> None:
        if len(self._members) >= MAX_MEMBERS:
            connection.close()
            return
        member = Member(connection, peer_of(connection))
        self._members.add(member)
        loop = asyncio.get_running_loop()
        loop.add_reader(connection, self._readable, member)
        loop.call_later(JOIN_WITHIN_S, self._join_due, member)

    def _join_due(self, member: Member) -> None:
        if not member.role:
            self._drop(member)

    def _readable(self, member: Member) -> None:
        try:
            data = member.socket.recv(MESSAGE_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or member.role or not self._join(member, data):
            self._drop(member)

    def _join(self, member: Member, data: bytes) -> bool:
        asked = floor_page.parse_join(data)
        if asked is None:
            return False
        gpu, role = uuid_text(asked.uuid), asked.role
        page = self.pages.get(gpu)
        tenant = self._tenant_of(member.peer.pid)
        if page is None or not self._allowed(member, role, tenant):
            LOG.warning(f"process {member.peer.pid} may not join the LS gate of {gpu}")
            return False
        if role == FloorRole.LATENCY_SENSITIVE:
            taken = {other.holder for other in self._members if other.gpu == gpu}
            member.holder = next((i for i in range(FLOOR_HOLDERS) if i not in taken), None)
            if member.holder is None:
                LOG.warning(f"the LS gate of {gpu} already has the maximum of {FLOOR_HOLDERS} LS processes")
                return False
            page.layout.pid[member.holder] = member.peer.pid
            page.layout.raises[member.holder] = 0
        member.gpu, member.role, member.words = gpu, role, asked.wants_words
        self._count(gpu)
        if role == FloorRole.BEST_EFFORT and tenant is not None:
            find = partial(slot_of, tenant, member.peer.pid, gpu)
            self.shares[gpu].join(member, find)
        spec = tenant.spec if tenant is not None else None
        work_class = WORK_CLASSES[spec.work_class] if spec else WorkClass.UNKNOWN
        sms, in_flight_us = (spec.work_sms, spec.in_flight_us) if spec else (0, 0)
        table = kernel_table.entries_of(spec.kernels) if spec and asked.wants_kernels else b""
        count = len(table) // KERNEL.size
        reply = floor_page.pack_page(member.holder or 0, work_class, sms, in_flight_us, count, words=asked.wants_words)
        fd = page.fd if role == FloorRole.LATENCY_SENSITIVE else page.read_fd
        try:
            socket.send_fds(member.socket, [reply], [fd])
            if count:
                _send_table(member.socket, table)
            if asked.wants_words:
                socket.send_fds(member.socket, [floor_page.pack_words()], [page.words_fd])
        except OSError:
            return False
        return True

    def _allowed(self, member: Member, role: int, tenant: Tenant | None) -> bool:
        """Return whether a process may join with this role. Any process of a tenant may join as best-effort. As
        latency-sensitive may join processes of latency-sensitive tenants, and processes outside containers, such as
        serving workers, whose user is root or the agent's user.
        """
        if role == FloorRole.LATENCY_SENSITIVE:
            own = member.peer.uid in (0, os.geteuid()) and not self._in_container(member.peer.pid)
            return own or (tenant is not None and tenant.spec.latency_sensitive)
        return role == FloorRole.BEST_EFFORT and tenant is not None

    def _count(self, gpu: str) -> None:
        roles = [m.role for m in self._members if m.gpu == gpu]
        layout = self.pages[gpu].layout
        layout.tenants = roles.count(FloorRole.BEST_EFFORT)
        layout.present = max(roles.count(FloorRole.LATENCY_SENSITIVE), int(self._grace))
        sensitive = [m for m in self._members if m.gpu == gpu and m.role == FloorRole.LATENCY_SENSITIVE]
        layout.present_words = sum(m.words for m in sensitive)

    def _drop(self, member: Member) -> None:
        """Remove a process that has disconnected from the LS gate, and clear its LS-activity flag."""
        if member not in self._members:
            return
        self._members.discard(member)
        asyncio.get_running_loop().remove_reader(member.socket)
        member.socket.close()
        if not member.role:
            return
        page = self.pages[member.gpu]
        if member.holder is not None:
            page.lower(member.holder)
        self.shares[member.gpu].leave(member)
        self._count(member.gpu)

    def status(self) -> dict[str, Any]:
        """Return the co-location settings in effect, and the processes at each LS gate."""
        return {
            **asdict(self.settings),
            "gpus": {gpu: self._gpu(gpu) for gpu in self.pages},
        }

    def _gpu(self, gpu: str) -> dict[str, Any]:
        layout = self.pages[gpu].layout
        holders = sorted(m.holder for m in self._members if m.gpu == gpu and m.holder is not None)
        # only flags whose heartbeat is fresh are listed, because best-effort processes ignore all other flags
        up = self.pages[gpu].up(time.monotonic_ns())
        return {
            "best_effort_processes": layout.tenants,
            "best_effort_counted": sum(parts != APART for parts in self.shares[gpu].parts.values()),
            "bounded": layout.present > 0,
            "duty_cycle": layout.duty_cycle_permille / 1000,
            "holders": [{"pid": layout.pid[i], "up": i in up, "raises": layout.raises[i]} for i in holders],
        }

    def close(self) -> None:
        """Close the socket of the LS gates and all connections; processes keep their mapped pages and their limits."""
        self._grace = True
        if self._mending is not None:
            self._mending.cancel()
        if self._looking is not None:
            self._looking.cancel()
        self._reading.clear()
        if self._listener is not None:
            self._listener.close()
        for shares in self.shares.values():
            shares.close()
        tenants = {gpu: page.layout.tenants for gpu, page in self.pages.items()}
        for member in list(self._members):
            self._drop(member)
        for gpu, page in self.pages.items():
            # best-effort processes keep using the page without an agent, and continue to share the in-flight budget
            page.layout.tenants = tenants[gpu]
            page.close()


def _send_table(to: socket.socket, table: bytes) -> None:
    """Send a tenant's kernel table to its process, as a memfd."""
    fd = kernel_table.shared(table)
    try:
        socket.send_fds(to, [floor_page.pack_kernels()], [fd])
    finally:
        os.close(fd)
