"""The socket of the shims: accepts processes, binds each to its tenant, notices their death, drops the misbehaving."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cotenant.abi.protocol import MESSAGE_BYTES, FailMode, MessageType, Status
from cotenant.abi.tenant_page import SlotFlag
from cotenant.agent import processes
from cotenant.agent.config.files import AgentConfig
from cotenant.agent.copies.links import Copies
from cotenant.agent.ipc import wire
from cotenant.agent.ipc.listener import Listener
from cotenant.agent.ipc.session import Session
from cotenant.agent.ipc.wire import BadMessageError
from cotenant.agent.memory.ledger import Ledger
from cotenant.agent.owners.holders import PATIENCE_S, Holders, NotYetError, Place, place_of
from cotenant.agent.tenants.registry import Registry, Tenant
from cotenant.agent.turns.broker import Broker

if TYPE_CHECKING:
    from cotenant.agent.memory.residency import Residency

MAX_SESSIONS = 8192
MAX_SESSIONS_PER_TENANT = 1024
MESSAGES_PER_WAKE = 16
MAX_STRANGERS = 32
HELLO_WITHIN_S = 10.0
CONTEXT_RESERVE_BYTES = 640 << 20  # a context with its modules takes 610 MiB on an H100 (driver 580, PyTorch)


class ShimServer:
    """All connections of shims on this node. `residency` is set by the agent before the first one."""

    residency: Residency

    def __init__(
        self,
        path: Path,
        config: AgentConfig,
        registry: Registry,
        broker: Broker,
        ledger: Ledger,
        log: Callable[[str], None],
        on_idle_tenant: Callable[[Tenant], None],
        on_process: Callable[[], None],
        locate: Callable[[int], Place | None] = place_of,
    ) -> None:
        self.path = path
        self.config = config
        self.registry = registry
        self.broker = broker
        self.ledger = ledger
        self.log = log
        self.loop = asyncio.get_running_loop()
        self.sessions: set[Session] = set()
        self.holders = Holders(locate)
        self.refused_connections = 0
        self.copies = Copies(config.copies)
        self._strangers: Counter[int] = Counter()  # connections without HELLO, by process
        self._on_idle_tenant = on_idle_tenant
        self._on_process = on_process
        self._numbers = time.monotonic_ns() // 1000
        self._listener: Listener | None = None

    @property
    def fail_mode(self) -> FailMode:
        """What shims do when this agent goes."""
        return FailMode.OPEN if self.config.fail == "open" else FailMode.CLOSED

    # -- listening -------------------------------------------------------------------------------------------------

    def listen(self, mode: int) -> None:
        """Open the socket; the caller holds the lock that makes us the only agent here."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._listener = Listener(self.path, mode, self._take, self.log)

    def _take(self, connection: socket.socket) -> None:
        if len(self.sessions) >= MAX_SESSIONS:
            self._turn_away(connection, Status.TOO_MANY, f"this agent already serves {MAX_SESSIONS} processes")
            return
        peer = processes.peer_of(connection)
        if self._strangers[peer.pid] >= MAX_STRANGERS:
            self._turn_away(connection, Status.TOO_MANY, "this process has too many connections without HELLO")
            return
        self._strangers[peer.pid] += 1
        self._numbers += 1
        session = Session(self, connection, peer, self._numbers)
        self.sessions.add(session)
        self.loop.add_reader(connection, self._readable, session)
        self.loop.call_later(HELLO_WITHIN_S, self._hello_due, session)

    def _turn_away(self, connection: socket.socket, status: Status, text: str) -> None:
        self.refused_connections += 1
        with contextlib.suppress(OSError):
            connection.send(wire.pack_text(MessageType.ERROR, status, text))
        connection.close()

    def _hello_due(self, session: Session) -> None:
        if not session.welcome and not session.closed:
            self.close(session, "it did not introduce itself")

    # -- traffic ---------------------------------------------------------------------------------------------------

    def _readable(self, session: Session) -> None:
        for _ in range(MESSAGES_PER_WAKE):
            if session.closed:
                return
            try:
                data = session.socket.recv(MESSAGE_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.close(session, "")
                return
            self.hear(session, data)

    def hear(self, session: Session, data: bytes) -> None:
        """Let a session handle a message; what it must not say ends its connection."""
        try:
            session.receive(data)
        except NotYetError as early:
            self.holders.wait(early.place, session, data)
            self.loop.call_later(PATIENCE_S, self._too_early, session, early.place)
        except BadMessageError as error:
            self._refuse(session, error.status, str(error))
        except Exception as error:  # a fault of ours ends this connection, not the agent
            session.fail(Status.INTERNAL, "the agent failed on this message")
            self.close(session, f"the agent failed on its message: {error!r}")

    def _refuse(self, session: Session, status: Status, why: str) -> None:
        self.refused_connections += 1
        session.fail(status, why)
        self.close(session, why)

    def _too_early(self, session: Session, place: Place) -> None:
        if not session.welcome and not session.closed:
            text = f"{place.kind} {place.id[:36]} has no share for this container on this node (its events may say why)"
            self._refuse(session, Status.UNKNOWN_TENANT, text)

    def bind(self, session: Session, token: str) -> Tenant:
        """The tenant a process belongs to: by its launcher's token, else by ancestry. BadMessageError: none."""
        peer = session.peer
        if peer.pid == 0:
            raise BadMessageError(
                Status.DENIED, "the agent cannot see this process: it has to run in the host's PID namespace (hostPID)"
            )
        tenant = self.holders.tenant_of(peer.pid, token)
        if tenant is not None:
            pass  # its cgroup says it, whatever token it has
        elif token:
            tenant = self.registry.by_token(token)
            if tenant is None:
                raise BadMessageError(Status.UNKNOWN_TENANT, "no tenant here has this token: it is stopped, or forged")
        else:
            tenant = self.registry.by_process(processes.ancestors(peer.pid))
            if tenant is None:
                raise BadMessageError(
                    Status.UNKNOWN_TENANT, f"process {peer.pid} belongs to no tenant: start it with cotenant run"
                )
        in_pod = tenant.holder is not None and tenant.holder.kind == "pod"  # whoever it runs as there
        if not in_pod and peer.uid not in (0, tenant.uid, os.geteuid()):
            raise BadMessageError(Status.DENIED, f"user {peer.uid} may not run as tenant {tenant.name}")
        if len(tenant.sessions) >= MAX_SESSIONS_PER_TENANT:
            raise BadMessageError(
                Status.TOO_MANY, f"tenant {tenant.name} already has {MAX_SESSIONS_PER_TENANT} processes"
            )
        session.process = processes.key_of(peer.pid)
        self._known(session)
        self._on_process()
        session.pidfd = processes.pidfd(session.process)
        if session.pidfd is not None:
            self.loop.add_reader(session.pidfd, self.close, session, "")
        return tenant

    def _known(self, session: Session) -> None:
        """The process has introduced itself, or has gone: it is no stranger any more."""
        if not session.stranger:
            return
        session.stranger = False
        self._strangers[session.peer.pid] -= 1
        if self._strangers[session.peer.pid] <= 0:
            del self._strangers[session.peer.pid]

    def close(self, session: Session, why: str) -> None:
        """End a connection: its turns, requests and memory are free from here on."""
        if session.closed:
            return
        session.closed = True
        self.sessions.discard(session)
        self.loop.remove_reader(session.socket)
        self.loop.remove_writer(session.socket)
        if session.pidfd is not None:
            self.loop.remove_reader(session.pidfd)
        if why:
            self.log(f"process {session.peer.pid} (user {session.peer.uid}) is disconnected: {why}")
        self._known(session)
        if session.welcome:
            tenant = session.tenant
            tenant.sessions.remove(session)
            tenant.launches_gone += sum(session.page.slots[slot].launches for slot in session.slots)
            tenant.waited_gone_ns += sum(session.page.slots[slot].waited_ns for slot in session.slots)
            self.broker.drop(session)
            self.copies.drop(session)
            self.residency.gone(session)
            for gpu in self.ledger.drop(session.number):
                self.publish_memory(tenant, gpu)
            if not tenant.sessions:
                self._on_idle_tenant(tenant)
        session.close_fds()

    def close_all(self) -> None:
        """Stop listening and let every process go; shims then do what fail_mode says."""
        if self._listener is not None:
            self._listener.close()
        for session in list(self.sessions):
            self.close(session, "")
        self.copies.close()

    # -- pages -----------------------------------------------------------------------------------------------------

    def fill_slot(self, session: Session, slot: int, uuid: bytes) -> None:
        """Describe a GPU to a process that has just attached it."""
        tenant, gpu = session.tenant, session.slots[slot]
        page = session.page.slots[slot]
        page.inflight_allowed_ns = self.config.inflight_ns
        page.idle_release_ns = self.config.idle_release_ns
        page.drain_timeout_ns = self.config.quota.stuck_ns
        page.memory_limit_bytes = self.ledger.limit(tenant.name, gpu)
        page.memory_used_bytes = self.ledger.used(tenant.name, gpu)
        page.memory_kept_bytes = self.ledger.not_for(tenant.name, gpu)
        page.uuid[:] = list(uuid)
        spec = tenant.spec
        gate = SlotFlag.BEST_EFFORT if spec.best_effort else SlotFlag(0)
        gate |= SlotFlag.HOLDS_FLOOR if spec.latency_sensitive else SlotFlag(0)
        turns = self.copies.flag(session, gpu)
        page.flags = SlotFlag.ATTACHED | tenant.enforcement.slot_flags | gate | turns

    def publish_memory(self, tenant: Tenant, gpu: str) -> None:
        """Write a tenant's memory numbers into the pages of all its processes."""
        used, limit = self.ledger.used(tenant.name, gpu), self.ledger.limit(tenant.name, gpu)
        for session in tenant.sessions:
            for slot, attached in session.slots.items():
                if attached == gpu:
                    page = session.page.slots[slot]
                    page.memory_used_bytes = used
                    page.memory_limit_bytes = limit
        if self.ledger.keeps(tenant.name, gpu):
            self.publish_kept(gpu)

    def publish_kept(self, gpu: str) -> None:
        """Tell everybody on a GPU what of its free memory is kept for others."""
        for session in self.sessions:
            if not session.welcome:
                continue
            for slot, attached in session.slots.items():
                if attached == gpu:
                    session.page.slots[slot].memory_kept_bytes = self.ledger.not_for(session.tenant.name, gpu)

    def context_reserve_bytes(self, gpu: str) -> int:
        """What a context is charged when its size is not known."""
        if self.config.context_reserve_bytes is not None:
            return self.config.context_reserve_bytes
        entry = self.registry.gpus.get(gpu)
        return 0 if entry is None or entry.soft else CONTEXT_RESERVE_BYTES

    def refused(self, tenant: Tenant, gpu: str, size: int) -> None:
        """Note a memory request over the cap."""
        limit, used = self.ledger.limit(tenant.name, gpu), self.ledger.used(tenant.name, gpu)
        if used + size <= limit:
            kept, left = self.ledger.kept_from(tenant.name, gpu), self.ledger.left(tenant.name, gpu)
            tenant.warn(
                f"out of memory: {size / 2**20:.0f} MiB asked with {left / 2**20:.0f} MiB left:"
                f" {kept / 2**20:.0f} MiB of the card are kept for latency-sensitive tenants"
            )
            return
        tenant.warn(
            f"out of memory: {size / 2**20:.0f} MiB asked with {used / 2**20:.0f} of {limit / 2**20:.0f} MiB in use"
        )

    def over(self, tenant: Tenant, gpu: str) -> None:
        """Note memory that could only be counted after it was taken, and is over the cap."""
        limit, used = self.ledger.limit(tenant.name, gpu), self.ledger.used(tenant.name, gpu)
        tenant.warn(
            f"over its memory: {used / 2**20:.0f} of {limit / 2**20:.0f} MiB in use (a graph's memory is counted after"
            " its launch)"
        )

    def tenant_of(self, pid: int) -> Tenant | None:
        """Whose a connected process is."""
        return next((s.tenant for s in self.sessions if s.welcome and s.peer.pid == pid), None)

    def warn(self, tenant: Tenant, text: str) -> None:
        """A warning of a shim, for people."""
        tenant.warn(text)
        self.log(f"tenant {tenant.name}: {text}")
