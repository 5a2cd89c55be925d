"""One process of a tenant, at the other end of a socket: its messages understood, checked and answered."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cotenant.abi.protocol import NO_DEADLINE, NO_SLOT, MemoryFamily, MessageType, Oversubscribe, Status
from cotenant.abi.tenant_page import MAX_GPUS, SlotFlag
from cotenant.agent.ipc import wire
from cotenant.agent.ipc.page import Page
from cotenant.agent.ipc.wire import BadMessageError
from cotenant.agent.memory.ledger import HOST
from cotenant.agent.memory.moves import MoveState
from cotenant.agent.processes import Peer, ProcessKey

if TYPE_CHECKING:
    from cotenant.agent.ipc.server import ShimServer
    from cotenant.agent.tenants.registry import Tenant

MAX_UNSENT = 256  # messages kept for a process that does not read


class Session:
    """State of one connection. `tenant` and `page` are there once HELLO has been accepted."""

    tenant: Tenant
    page: Page

    def __init__(self, server: ShimServer, connection: socket.socket, peer: Peer, number: int) -> None:
        self.server = server
        self.socket = connection
        self.peer = peer
        self.number = number
        self.process = ProcessKey(peer.pid, 0)
        self.program = ""
        self.welcome = False
        self.stranger = True
        self.closed = False
        self.slots: dict[int, str] = {}  # slot -> GPU UUID
        self.asking: set[int] = set()
        self.moves: dict[int, MoveState] = {}  # slot -> where its movable memory is
        self.granted: dict[int, int] = {}  # slot -> epoch on the wire
        self.pidfd: int | None = None
        self._unsent: list[bytes] = []

    # -- sending ---------------------------------------------------------------------------------------------------

    def send(self, data: bytes, fd: int = -1) -> None:
        """Send without waiting. Messages for a process that does not read are kept; at 256 of them it is dropped.

        `fd` goes along where that can be now: the message must mean something without it.
        """
        if self.closed:
            return
        if fd >= 0 and not self._unsent:
            with contextlib.suppress(OSError):
                socket.send_fds(self.socket, [data], [fd])
                return
        if self._unsent:
            self._keep(data)
            return
        try:
            self.socket.send(data)
        except BlockingIOError:
            self._keep(data)
            self.server.loop.add_writer(self.socket, self._send_rest)
        except OSError:
            self.server.loop.call_soon(self.server.close, self, "")

    def send_with(self, data: bytes, fd: int) -> None:
        """Send a message that carries a descriptor. A process that leaves its messages unread is dropped."""
        try:
            if self._unsent:
                raise BlockingIOError
            socket.send_fds(self.socket, [data], [fd])
        except BlockingIOError:
            self.server.loop.call_soon(self.server.close, self, "it asked for a page and reads nothing")
        except OSError:
            self.server.loop.call_soon(self.server.close, self, "")

    def _keep(self, data: bytes) -> None:
        self._unsent.append(data)
        if len(self._unsent) > MAX_UNSENT:
            self.server.loop.call_soon(self.server.close, self, f"it left {MAX_UNSENT} messages unread")

    def _send_rest(self) -> None:
        try:
            while self._unsent:
                self.socket.send(self._unsent[0])
                del self._unsent[0]
        except BlockingIOError:
            return
        except OSError:
            self.server.close(self, "")
            return
        self.server.loop.remove_writer(self.socket)

    def fail(self, status: Status, text: str, sequence: int = 0, slot: int = NO_SLOT) -> None:
        """Answer with ERROR."""
        self.send(wire.pack_text(MessageType.ERROR, status, text, sequence=sequence, slot=slot))

    # -- receiving -------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Handle one message. BadMessageError: the caller answers and closes."""
        head = wire.parse_head(data)
        if not self.welcome:
            if head.type != MessageType.HELLO:
                raise BadMessageError(Status.BAD_MESSAGE, "the first message must be HELLO")
            self._hello(head.sequence, wire.fields("hello", data))
            return
        handler = _HANDLERS.get(head.type)
        if handler is None:
            raise BadMessageError(Status.BAD_MESSAGE, f"message type {head.type} is not one that a shim sends")
        handler(self, head, data)

    def _hello(self, sequence: int, hello: dict[str, Any]) -> None:
        token = wire.text_of(hello["token"])
        self.program = wire.text_of(hello["program"])
        tenant = self.server.bind(self, token)
        self.tenant = tenant
        self.page = Page(self.number, self.server.fail_mode)
        reply = wire.pack(
            MessageType.HELLO_REPLY,
            {
                "connection_id": self.number,
                "fail_mode": self.server.fail_mode,
                "reconnect_ms": self.server.config.reconnect_ms,
                "tenant": tenant.name.encode(),
                "oversubscribe": Oversubscribe[tenant.spec.oversubscribe.upper()],
            },
            sequence=sequence,
        )
        try:
            socket.send_fds(self.socket, [reply], [self.page.fd])
        except OSError:
            self.server.loop.call_soon(self.server.close, self, "")
            return
        finally:
            self.page.close_fd()
        self.welcome = True
        tenant.sessions.append(self)
        self.server.ledger.join(self.number, tenant.name)

    def _attach(self, head: wire.Head, data: bytes) -> None:
        from cotenant.devices.gpus import uuid_text

        raw, *_ = wire.body("gpu_attach", data)
        uuid = uuid_text(raw)
        slot = next((s for s, gpu in self.slots.items() if gpu == uuid), None)
        if slot is None:
            mine = {gpu.uuid for gpu in self.tenant.gpus}
            if uuid not in mine:
                known = uuid in self.server.registry.gpus
                status = Status.DENIED if known else Status.UNKNOWN_GPU
                text = f"{self.program} used {uuid}, which is not among the GPUs of tenant {self.tenant.name}"
                self.server.warn(self.tenant, text)
                self.send(wire.pack(MessageType.GPU_REPLY, sequence=head.sequence, status=status))
                return
            slot = len(self.slots)
            if slot >= MAX_GPUS:
                self.send(wire.pack(MessageType.GPU_REPLY, sequence=head.sequence, status=Status.TOO_MANY))
                return
            self.slots[slot] = uuid
            self.server.fill_slot(self, slot, raw)
        self.send(wire.pack(MessageType.GPU_REPLY, sequence=head.sequence, slot=slot))

    def _gpu(self, head: wire.Head) -> str:
        gpu = self.slots.get(head.slot)
        if gpu is None:
            raise BadMessageError(Status.BAD_MESSAGE, f"slot {head.slot} was never attached")
        return gpu

    def _request(self, head: wire.Head, data: bytes) -> None:
        self._gpu(head)
        burst_ns = wire.body("token_request", data)[0]
        if self.tenant.enforcement.slot_flags & SlotFlag.UNGATED:  # not as its page says, which it can write
            self.send(wire.pack_grant(head.sequence, head.slot, 0, 1, NO_DEADLINE, 0))
            return
        self.server.broker.request(self, head.slot, min(burst_ns, 1 << 62))

    def _release(self, head: wire.Head, data: bytes) -> None:
        self._gpu(head)
        values = wire.body("token_release", data)
        epoch, drained_ns, reason, drained, more = values[0], values[4], *values[9:12]
        self.server.broker.release(self, head.slot, epoch, drained_ns, reason, bool(drained), bool(more))

    def _memory(self, head: wire.Head, data: bytes) -> None:
        family, reservation, size, _used, _limit = wire.body("memory", data)
        if not MemoryFamily.PLAIN <= family <= MemoryFamily.HOST and head.type != MessageType.MEMORY_QUERY:
            raise BadMessageError(Status.BAD_MESSAGE, f"memory family {family} is not known")
        if size >> 62:
            raise BadMessageError(Status.BAD_MESSAGE, f"{size} bytes is not an amount of memory")
        host = family == MemoryFamily.HOST or head.slot == NO_SLOT
        gpu = HOST if host else self._gpu(head)
        ledger, tenant = self.server.ledger, self.tenant.name
        number, status = 0, Status.OK
        if family == MemoryFamily.CONTEXT and size == 0 and head.type != MessageType.MEMORY_QUERY:
            # its size is not known to the process: charge the reserve, give back all of it
            size = self.server.context_reserve_bytes(gpu)
        if head.type == MessageType.MEMORY_RESERVE:
            granted = ledger.reserve(self.number, gpu, family, size)
            if granted is None:
                status = Status.OUT_OF_MEMORY
                self.server.refused(self.tenant, gpu, size)
            elif not host and self.server.residency.maker.crowded(self.tenant, gpu, family):
                status = Status.DENIED
            number = granted or 0
        elif head.type == MessageType.MEMORY_COMMIT and reservation == 0:
            # could not be asked for before it was taken: memory of graphs, a pool that grew by itself
            ledger.take(self.number, gpu, family, size)
            if ledger.used(tenant, gpu) > ledger.limit(tenant, gpu):
                self.server.over(self.tenant, gpu)
        elif head.type == MessageType.MEMORY_COMMIT:
            # a reservation of an agent that has restarted is not known here: MEMORY_STATE brings the truth
            ledger.commit(self.number, reservation, size)
        elif head.type == MessageType.MEMORY_RELEASE:
            ledger.release(self.number, gpu, family, size)
        elif head.type == MessageType.MEMORY_STATE:
            ledger.state(self.number, gpu, family, size)
        if head.type in (MessageType.MEMORY_RESERVE, MessageType.MEMORY_QUERY):
            used, limit = ledger.used(tenant, gpu), ledger.limit(tenant, gpu)
            self.send(wire.pack_memory_reply(head.sequence, head.slot, status, family, number, size, used, limit))
        if head.type != MessageType.MEMORY_QUERY and not host:
            self.server.publish_memory(self.tenant, gpu)

    def _backing(self, head: wire.Head, data: bytes) -> None:
        self.server.residency.backing(self, head.sequence)

    def _moved(self, head: wire.Head, data: bytes) -> None:
        self._gpu(head)
        self.server.residency.told(self, head.type, head.slot, head.sequence, head.status, wire.fields("move", data))

    def _room(self, head: wire.Head, data: bytes) -> None:
        self._gpu(head)
        self.server.residency.room(self, head.slot, head.sequence, wire.fields("move", data))

    def _burst(self, head: wire.Head, data: bytes) -> None:
        gpu = self._gpu(head)
        account = self.server.broker.turns.gpus[gpu].accounts.get(self.tenant.name)
        if account is not None:
            account.burst_ns = min(wire.body("burst", data)[0], 1 << 62)

    def _attach_copies(self, head: wire.Head, data: bytes) -> None:
        given = self.server.copies.attach(self, self._gpu(head))
        if given is None:  # turns were switched off again, or there is no queue left
            self.send(wire.pack(MessageType.COPY_REPLY, sequence=head.sequence, slot=head.slot, status=Status.DENIED))
            return
        fd, terms = given
        reply = wire.pack(MessageType.COPY_REPLY, terms, sequence=head.sequence, slot=head.slot)
        self.send_with(reply, fd)

    def _warning(self, head: wire.Head, data: bytes) -> None:
        code, raw = wire.body("text", data)
        text = wire.text_of(raw)
        self.server.warn(self.tenant, f"{self.program} ({self.peer.pid}): {text} [{code}]")

    def _goodbye(self, head: wire.Head, data: bytes) -> None:
        self.server.close(self, "")

    def close_fds(self) -> None:
        """Release the descriptors of this connection."""
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        self.socket.close()
        if self.welcome:
            self.page.release()


_HANDLERS: dict[int, Callable[[Session, wire.Head, bytes], None]] = {
    MessageType.GPU_ATTACH: Session._attach,
    MessageType.TOKEN_REQUEST: Session._request,
    MessageType.TOKEN_RELEASE: Session._release,
    MessageType.MEMORY_RESERVE: Session._memory,
    MessageType.MEMORY_COMMIT: Session._memory,
    MessageType.MEMORY_RELEASE: Session._memory,
    MessageType.MEMORY_QUERY: Session._memory,
    MessageType.MEMORY_STATE: Session._memory,
    MessageType.BURST_REPORT: Session._burst,
    MessageType.MOVE_BACKING: Session._backing,
    MessageType.MOVE_STATE: Session._moved,
    MessageType.MOVE_PROGRESS: Session._moved,
    MessageType.MOVE_DONE: Session._moved,
    MessageType.MOVE_ROOM: Session._room,
    MessageType.WARNING: Session._warning,
    MessageType.GOODBYE: Session._goodbye,
    MessageType.COPY_ATTACH: Session._attach_copies,
}
