"""A tiny agent for tests of the shim: one rule (all get turns of the same length, in order), every message kept."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waiting import wait_for

from cotenant.abi.protocol import (
    BODY_OF,
    MESSAGE_BYTES,
    NO_DEADLINE,
    NO_LIMIT,
    NO_SLOT,
    PROTOCOL_MAGIC,
    PROTOCOL_VERSION,
    MemoryFamily,
    MessageType,
    Status,
)
from cotenant.abi.tenant_page import MAX_GPUS, PAGE_BYTES, PageLayout, SlotFlag, SlotLayout
from cotenant.agent.ipc.wire import fields, pack, parse_head


@dataclass
class Message:
    type: int
    slot: int
    sequence: int
    status: int
    fields: dict[str, Any]
    fd: int = -1  # file descriptor that came with the message, or -1

    def __getitem__(self, name: str) -> int:
        """A number of the body."""
        return int(self.fields[name])


@dataclass
class Client:
    connection: socket.socket
    page: mmap.mmap
    messages: list[Message] = field(default_factory=list)
    uuids: list[bytes] = field(default_factory=list)
    epoch: int = 0
    closed: bool = False

    def slot(self, index: int = 0) -> SlotLayout:
        return PageLayout.from_buffer(self.page).slots[index]

    def send(
        self, kind: MessageType, *, fd: int | None = None, slot: int = NO_SLOT, sequence: int = 0, status: int = 0,
        **fields: Any,
    ) -> None:  # fmt: skip
        message = pack(kind, fields, slot=slot, sequence=sequence, status=status, sent_ns=time.monotonic_ns())
        with contextlib.suppress(OSError):
            socket.send_fds(self.connection, [message], [] if fd is None else [fd])

    def of(self, kind: int) -> list[Message]:
        return [message for message in self.messages if message.type == kind]


class FakeAgent:
    """Listens at `path`. turn_ns None: a grant without end. memory_limit: bytes for all clients together. refuse: how
    many HELLO messages it refuses before it accepts one.
    """

    def __init__(
        self,
        path: Path,
        *,
        turn_ns: int | None = None,
        memory_limit: int | None = None,
        fail_mode: int = 0,
        inflight_ns: int = 2_000_000,
        idle_ns: int = 2_000_000,
        drain_ns: int = 5_000_000_000,
        flags: int = 0,
        refuse: float = 0,
        context_bytes: int = 0,
        oversubscribe: int = 0,
        backing_bytes: int = 0,
        backing_there: int | None = None,
    ) -> None:
        self.path, self.turn_ns, self.fail_mode, self.flags, self.refuse = path, turn_ns, fail_mode, flags, refuse
        self.memory_limit = memory_limit
        self.inflight_ns, self.idle_ns, self.drain_ns = inflight_ns, idle_ns, drain_ns
        self.context_bytes = context_bytes
        self.oversubscribe, self.backing_bytes = oversubscribe, backing_bytes
        # host memory that the system really has
        self.backing_there = backing_bytes if backing_there is None else backing_there
        # statuses to answer MOVE_ROOM with, in order; afterwards the answer is OUT_OF_MEMORY
        self.room_answers: list[int] = []
        self.denied: set[bytes] = set()
        self.used: dict[int, int] = {}
        self.reservations: dict[int, int] = {}
        self.clients: list[Client] = []
        self.lock = threading.RLock()
        self.queue: deque[Client] = deque()
        self.holder: Client | None = None
        self.granting = True
        self.closed = False
        # true to act as an agent that hangs: connections stay open, and nothing is read or answered
        self.silent = False
        self.next_epoch = 1
        self.next_reservation = 1
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(path))
        self.listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for client in self.clients:
            with contextlib.suppress(OSError):
                client.connection.shutdown(socket.SHUT_RDWR)
            client.connection.close()

    def __enter__(self) -> FakeAgent:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    @property
    def total_used(self) -> int:
        return sum(self.used.values())

    def releases(self) -> list[Message]:
        return [message for client in self.clients for message in client.of(MessageType.TOKEN_RELEASE)]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            if self.closed:  # the connection came while this agent was closing
                connection.close()
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        fd = os.memfd_create("page")
        os.ftruncate(fd, PAGE_BYTES)
        page = mmap.mmap(fd, PAGE_BYTES)
        client = Client(connection, page)
        layout = PageLayout.from_buffer(page)
        layout.magic, layout.version = PROTOCOL_MAGIC, PROTOCOL_VERSION
        layout.page_bytes, layout.slot_count = PAGE_BYTES, MAX_GPUS
        with self.lock:
            self.clients.append(client)
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 1)
            except OSError:
                data, fds = b"", []
            if len(data) != MESSAGE_BYTES:
                break
            head = parse_head(data)
            body = fields(BODY_OF[head.type], data) if head.type in BODY_OF else {}
            message = Message(head.type, head.slot, head.sequence, head.status, body, fds[0] if fds else -1)
            while self.silent:
                time.sleep(0.01)
            with self.lock:
                client.messages.append(message)
                self._handle(client, message, fd)
        with self.lock:
            client.closed = True
            self.used.pop(id(client), None)
            if client in self.queue:
                self.queue.remove(client)
            if self.holder is client:
                self.holder = None
            self._grant_next()
        os.close(fd)

    def _handle(self, client: Client, message: Message, fd: int | None) -> None:
        if message.type == MessageType.HELLO:
            if self.refuse > 0:
                self.refuse -= 1
                refusal = Status.UNKNOWN_TENANT
                why = {"code": refusal, "text": b"unknown tenant"}
                client.send(MessageType.ERROR, sequence=message.sequence, status=refusal, **why)
                return
            client.send(
                MessageType.HELLO_REPLY, fd=fd, sequence=message.sequence, connection_id=7, fail_mode=self.fail_mode,
                reconnect_ms=50, tenant=b"test-tenant", oversubscribe=self.oversubscribe,
            )  # fmt: skip
        elif message.type == MessageType.GPU_ATTACH:
            self._attach(client, message)
        elif message.type == MessageType.TOKEN_REQUEST:
            self.queue.append(client)
            self._grant_next()
        elif message.type == MessageType.TOKEN_RELEASE and self.holder is client and message["drained"]:
            self.holder = None
            client.slot().epoch = 0
            self._grant_next()
        elif message.type == MessageType.MEMORY_QUERY:
            limit = NO_LIMIT if self.memory_limit is None else self.memory_limit
            numbers = {"used_bytes": max(0, self.total_used), "limit_bytes": limit}
            client.send(MessageType.MEMORY_REPLY, slot=0, sequence=message.sequence, **numbers)
        elif message.type == MessageType.MOVE_BACKING:
            memory = os.memfd_create("backing")
            os.ftruncate(memory, self.backing_there)
            fd = memory if self.backing_bytes else None
            backing = {"backing_bytes": self.backing_bytes}
            client.send(MessageType.MOVE_BACKING_REPLY, fd=fd, sequence=message.sequence, **backing)
            os.close(memory)
        elif message.type == MessageType.MOVE_ROOM:
            status = self.room_answers.pop(0) if self.room_answers else Status.OUT_OF_MEMORY
            client.send(MessageType.MOVE_ROOM_REPLY, slot=0, sequence=message.sequence, status=status)
        elif message.type in (MessageType.MEMORY_RESERVE, MessageType.MEMORY_COMMIT, MessageType.MEMORY_RELEASE):
            self._memory(client, message)

    def _attach(self, client: Client, message: Message) -> None:
        """A slot for each GPU, in the order in which they come; turns are given on the first only."""
        uuid = message.fields["uuid"]
        if uuid in self.denied:
            client.send(MessageType.GPU_REPLY, sequence=message.sequence, status=Status.DENIED)
            return
        slot = client.uuids.index(uuid) if uuid in client.uuids else len(client.uuids)
        if slot == len(client.uuids):
            client.uuids.append(uuid)
        row = client.slot(slot)
        row.inflight_allowed_ns, row.idle_release_ns = self.inflight_ns, self.idle_ns
        row.drain_timeout_ns = self.drain_ns
        row.memory_limit_bytes = NO_LIMIT if self.memory_limit is None else self.memory_limit
        row.flags = SlotFlag.ATTACHED | self.flags
        client.send(MessageType.GPU_REPLY, slot=slot, sequence=message.sequence)

    def _grant_next(self) -> None:
        if self.holder is not None or not self.queue or not self.granting:
            return
        client = self.queue.popleft()
        self.holder = client
        epoch = self.next_epoch
        self.next_epoch += 1
        deadline = NO_DEADLINE if self.turn_ns is None else time.monotonic_ns() + self.turn_ns
        client.slot().deadline_ns = deadline
        client.slot().epoch = epoch
        client.epoch = epoch
        grant = {"epoch": epoch, "deadline_ns": deadline, "inflight_allowed_ns": self.inflight_ns}
        client.send(MessageType.TOKEN_GRANT, slot=0, **grant)

    def pause(self) -> None:
        """Give no more turns. The turn under way goes on."""
        with self.lock:  # a thread that is about to give a turn has given it before this returns
            self.granting = False

    def resume(self) -> None:
        with self.lock:
            self.granting = True
            self._grant_next()

    def revoke(self) -> None:
        with self.lock:
            assert self.holder is not None
            self.holder.slot().epoch = 0
            self.holder.send(MessageType.TOKEN_REVOKE, slot=0, epoch=self.holder.epoch)

    def set_flags(self, flags: int) -> None:
        for client in self.clients:
            client.slot().flags = SlotFlag.ATTACHED | flags
            client.send(MessageType.PAGE_UPDATE, slot=0)

    def move(self, kind: MessageType, bytes_: int, *, base: int = 0, span: int = 0, client: int = 0) -> Message:
        """Order a move and wait for its end."""
        to = self.clients[client]
        before = len(to.of(MessageType.MOVE_DONE))
        span_of = {"bytes": bytes_, "base": base, "span_bytes": span or self.backing_bytes}
        to.send(kind, slot=0, sequence=1000 + before, **span_of)
        wait_for(lambda: len(to.of(MessageType.MOVE_DONE)) != before, what="the move did not end")
        return to.of(MessageType.MOVE_DONE)[-1]

    def _memory(self, client: Client, message: Message) -> None:
        reservation, count, family = message["reservation"], message["bytes"], message["family"]
        if family == MemoryFamily.HOST:
            if message.type == MessageType.MEMORY_RESERVE:
                client.send(MessageType.MEMORY_REPLY, sequence=message.sequence)
            return
        mine = self.used.get(id(client), 0)
        if message.type == MessageType.MEMORY_RESERVE:
            count += self.context_bytes if family == MemoryFamily.CONTEXT else 0
            refused = self.memory_limit is not None and self.total_used + count > self.memory_limit
            number = self.next_reservation
            self.next_reservation += 1
            if not refused:
                self.reservations[number] = count
                self.used[id(client)] = mine + count
            status = Status.OUT_OF_MEMORY if refused else Status.OK
            reply = {"reservation": number}
            client.send(MessageType.MEMORY_REPLY, slot=0, sequence=message.sequence, status=status, **reply)
        elif message.type == MessageType.MEMORY_COMMIT:
            kept = self.context_bytes if family == MemoryFamily.CONTEXT else count
            self.used[id(client)] = mine + kept - self.reservations.pop(reservation, 0)
        else:
            self.used[id(client)] = mine - (self.context_bytes if family == MemoryFamily.CONTEXT else count)
        for each in self.clients:
            each.slot().memory_used_bytes = max(0, self.total_used)
