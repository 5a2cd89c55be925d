"""The socket for the shims in tenants' processes: accepts processes, assigns each process to its tenant, detects when a
process ends, and disconnects a process that breaks the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cotenant.abi.protocol import MESSAGE_BYTES, MessageType, Oversubscribe, Status
from cotenant.agent import processes
from cotenant.agent.config.files import InForce
from cotenant.agent.ipc import wire
from cotenant.agent.ipc.listener import Listener
from cotenant.agent.ipc.page import Page
from cotenant.agent.ipc.wire import BadMessageError
from cotenant.agent.owners.owners import PATIENCE_S, NotYetError, Owners
from cotenant.agent.shims.requests import Requests
from cotenant.agent.tenants.places import Place
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import Session, Tenant
from cotenant.core.background import spawn
from cotenant.core.errors import InputError

LOG = logging.getLogger(__name__)

MAX_SESSIONS = 8192
MAX_SESSIONS_PER_TENANT = 1024
MESSAGES_PER_WAKE = 16
MAX_STRANGERS = 32
HELLO_WITHIN_S = 10.0
MOST_DESCRIPTORS = 4  # largest number of descriptors that come with a message


class ShimServer:
    """Serves all connections of shims to this agent."""

    def __init__(
        self,
        path: Path,
        registry: Registry,
        owners: Owners,
        requests: Requests,
        in_force: InForce,
        on_process: Callable[[], None],
        on_idle_tenant: Callable[[Tenant], None],
    ) -> None:
        """`on_process` is called for every process that was assigned to a tenant, `on_idle_tenant` when the last
        process of a tenant has ended.
        """
        self.path = path
        self.sessions: set[Session] = set()
        self.refused_connections = 0
        self._limiting: set[asyncio.Task[None]] = set()
        self._registry, self._owners, self._requests, self._in_force = registry, owners, requests, in_force
        self._on_process, self._on_idle_tenant = on_process, on_idle_tenant
        self._loop = asyncio.get_running_loop()
        self._strangers: Counter[int] = Counter()  # process -> number of its connections that have not sent HELLO
        self._numbers = time.monotonic_ns() // 1000
        self._listener: Listener | None = None

    # -- listening -------------------------------------------------------------------------------------------------

    def listen(self, mode: int) -> None:
        """Open the socket for the shims. The caller must hold the lock of the agent's folder, so that no other agent
        has a socket there.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._listener = Listener(self.path, mode, self._take)

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
        session = Session(connection, peer, self._numbers, self.close)
        self.sessions.add(session)
        self._loop.add_reader(connection, self._readable, session)
        self._loop.call_later(HELLO_WITHIN_S, self._hello_due, session)

    def _turn_away(self, connection: socket.socket, status: Status, text: str) -> None:
        self.refused_connections += 1
        with contextlib.suppress(OSError):
            connection.send(wire.pack_text(MessageType.ERROR, status, text))
        connection.close()

    def _hello_due(self, session: Session) -> None:
        if not session.welcome and not session.closed:
            self.close(session, "the process sent no HELLO")

    # -- traffic ---------------------------------------------------------------------------------------------------

    def _readable(self, session: Session) -> None:
        for _ in range(MESSAGES_PER_WAKE):
            if session.closed:
                return
            try:
                data, session.passed, _, _ = socket.recv_fds(
                    session.socket, MESSAGE_BYTES + 1, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.close(session, "")
                return
            self.hear(session, data)
            session.drop_passed()

    def hear(self, session: Session, data: bytes) -> None:
        """Handle a message of a process. A message that the protocol forbids ends the connection."""
        with self._answering(session, data):
            head = wire.parse_head(data)
            if session.welcome:
                self._requests.receive(session, head, data)
            elif head.type == MessageType.HELLO:
                self._hello(session, head.sequence, wire.fields("hello", data))
            else:
                raise BadMessageError(Status.BAD_MESSAGE, "the first message must be HELLO")

    @contextlib.contextmanager
    def _answering(self, session: Session, data: bytes) -> Iterator[None]:
        """Tell a process what goes wrong while its message is handled."""
        try:
            yield
        except NotYetError as early:
            self._owners.wait(early.place, session, data)
            self._loop.call_later(PATIENCE_S, self._too_early, session, early.place)
        except BadMessageError as error:
            self._refuse(session, error.status, str(error))
        # an InputError names an option of `cotenant run`, which the user of the connected process may not have written,
        # so only the text without the option is sent
        except InputError as error:
            self._refuse(session, Status.DENIED, error.message)
        except Exception as error:  # if the agent fails on a message, only this connection ends
            session.fail(Status.INTERNAL, "the agent failed on this message; its log has the error")
            self.close(session, f"the agent failed on a message of the process: {error!r}")

    def _refuse(self, session: Session, status: Status, why: str) -> None:
        self.refused_connections += 1
        session.fail(status, why)
        self.close(session, why)

    def _too_early(self, session: Session, place: Place) -> None:
        if not session.welcome and not session.closed:
            text = f"{place.kind} {place.id[:36]} has no share for this container on this node (see its events)"
            self._refuse(session, Status.UNKNOWN_TENANT, text)

    def _hello(self, session: Session, sequence: int, hello: dict[str, Any]) -> None:
        session.program = wire.text_of(hello["program"])
        tenant = session.tenant = self._bind(session, wire.text_of(hello["token"]))
        config = self._in_force.config
        fail_mode = self._registry.fail_mode(tenant, config.fail)
        session.page = Page(session.number, fail_mode)
        reply = wire.pack(
            MessageType.HELLO_REPLY,
            {
                "connection_id": session.number,
                "fail_mode": fail_mode,
                "reconnect_ms": config.reconnect_ms,
                "tenant": tenant.name.encode(),
                "oversubscribe": Oversubscribe[tenant.spec.oversubscribe.upper()],
            },
            sequence=sequence,
        )
        try:
            socket.send_fds(session.socket, [reply], [session.page.fd])
        except OSError:
            self._loop.call_soon(self.close, session, "")
            return
        finally:
            session.page.close_fd()
        session.welcome = True
        tenant.sessions.append(session)
        self._requests.came(session)
        if tenant.owner is not None:
            spawn(self._limiting, self._limit(session))

    async def _limit(self, session: Session) -> None:
        with self._answering(session, b""):
            await self._requests.limit(session)

    def _bind(self, session: Session, token: str) -> Tenant:
        """Find the tenant of a process: by its pod or job, else by its token, else by its parents. Raises
        BadMessageError if the process has no tenant or may not run as that tenant.
        """
        peer = session.peer
        if peer.pid == 0:
            raise BadMessageError(
                Status.DENIED,
                "the agent cannot see this process: the agent must run in the host's PID namespace (hostPID)",
            )
        tenant = self._owners.tenant_of(peer.pid, token)
        if tenant is not None:
            pass  # the cgroup has identified the tenant, so the token is not needed
        elif token:
            tenant = self._registry.by_token(token)
            if tenant is None:
                raise BadMessageError(
                    Status.UNKNOWN_TENANT, "no tenant has this token: the tenant was stopped, or the token is forged"
                )
        else:
            tenant = self._registry.by_process(processes.ancestors(peer.pid))
            if tenant is None:
                raise BadMessageError(
                    Status.UNKNOWN_TENANT, f"process {peer.pid} belongs to no tenant: start it with cotenant run"
                )
        # any user inside a pod may run the pod's tenant
        in_pod = tenant.owner is not None and tenant.owner.kind == "pod"
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
            self._loop.add_reader(session.pidfd, self.close, session, "")
        return tenant

    def _known(self, session: Session) -> None:
        """Stop counting a connection as unidentified, because its process has sent HELLO or has ended."""
        if not session.stranger:
            return
        session.stranger = False
        self._strangers[session.peer.pid] -= 1
        if self._strangers[session.peer.pid] <= 0:
            del self._strangers[session.peer.pid]

    def close(self, session: Session, why: str) -> None:
        """End the connection of a process, and free its turns, requests and memory."""
        if session.closed:
            return
        session.closed = True
        self.sessions.discard(session)
        self._loop.remove_reader(session.socket)
        self._loop.remove_writer(session.socket)
        if session.pidfd is not None:
            self._loop.remove_reader(session.pidfd)
        if why:
            LOG.warning(f"process {session.peer.pid} (user {session.peer.uid}) is disconnected: {why}")
        self._known(session)
        if session.welcome:
            tenant = session.tenant
            tenant.sessions.remove(session)
            tenant.launches_gone += sum(session.page.slots[slot].launches for slot in session.slots)
            tenant.waited_gone_ns += sum(session.page.slots[slot].waited_ns for slot in session.slots)
            self._requests.gone(session)
            if not tenant.sessions:
                self._on_idle_tenant(tenant)
        session.close_fds()

    def close_all(self) -> None:
        """Stop listening and disconnect every process. Their shims then wait for an agent or continue without one, as
        `fail_mode` in the answer to their HELLO said.
        """
        if self._listener is not None:
            self._listener.close()
        for session in list(self.sessions):
            self.close(session, "")
