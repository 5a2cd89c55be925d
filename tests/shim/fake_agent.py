"""A tiny agent for tests of the shim: one rule (everybody gets turns of the same length, in order), every message kept.

It speaks the protocol by the offsets in protocol.h, read with ctypes, and shares no code with the real agent.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

MAGIC, VERSION, BYTES, PAGE = 0x434F5445, 1, 256, 8192
HELLO, ATTACH, REQUEST, RELEASE, RESERVE, COMMIT, MEM_RELEASE, QUERY, STATE, WARNING = 1, 2, 3, 4, 5, 6, 7, 8, 9, 11
HELLO_REPLY, GPU_REPLY, GRANT, REVOKE, MEMORY_REPLY, UPDATE, ERROR = 64, 65, 66, 67, 68, 69, 70
MOVE_STATE, MOVE_ROOM, MOVE_PROGRESS, MOVE_DONE, MOVE_BACKING = 80, 81, 82, 83, 84
MOVE_OUT, MOVE_IN, MOVE_ALLOW, MOVE_ROOM_REPLY, MOVE_BACKING_REPLY = 88, 89, 90, 91, 92
HEADER = struct.Struct("=IHHQIIQ")
FOREVER = 2**64 - 1
CONTENDED, UNGATED, UNFENCED = 2, 4, 8


@dataclass
class Message:
    type: int
    slot: int
    sequence: int
    status: int
    body: bytes

    def u64(self, offset: int) -> int:
        return int(struct.unpack_from("=Q", self.body, offset)[0])

    def u32(self, offset: int) -> int:
        return int(struct.unpack_from("=I", self.body, offset)[0])


@dataclass
class Client:
    connection: socket.socket
    page: mmap.mmap
    messages: list[Message] = field(default_factory=list)
    uuids: list[bytes] = field(default_factory=list)
    epoch: int = 0
    closed: bool = False

    def slot(self, index: int, offset: int) -> ctypes.c_uint64:
        return ctypes.c_uint64.from_buffer(self.page, 256 + 256 * index + offset)

    def flags(self, value: int, slot: int = 0) -> None:
        ctypes.c_uint32.from_buffer(self.page, 256 + 256 * slot + 56).value = value

    def send(self, kind: int, body: bytes = b"", *, slot: int = 0xFFFFFFFF, sequence: int = 0, status: int = 0) -> None:
        head = HEADER.pack(MAGIC, VERSION, kind, sequence, status, slot, time.monotonic_ns())
        with contextlib.suppress(OSError):
            self.connection.send((head + body).ljust(BYTES, b"\0"))

    def of(self, kind: int) -> list[Message]:
        return [message for message in self.messages if message.type == kind]


class FakeAgent:
    """Listens at `path`. turn_ns None: a grant without end. memory_limit: bytes for all clients together."""

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
        refuse: bool = False,
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
        self.backing_there = backing_bytes if backing_there is None else backing_there  # what the system really has
        self.room_answers: list[int] = []  # statuses for MOVE_ROOM, in order; then OUT_OF_MEMORY
        self.denied: set[bytes] = set()
        self.used: dict[int, int] = {}
        self.reservations: dict[int, int] = {}
        self.clients: list[Client] = []
        self.lock = threading.RLock()
        self.queue: deque[Client] = deque()
        self.holder: Client | None = None
        self.granting = True
        self.closed = False
        self.silent = False  # as one that hangs: connections stay, nothing is read or answered
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
        return [message for client in self.clients for message in client.of(RELEASE)]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            if self.closed:  # it came while we went
                connection.close()
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        fd = os.memfd_create("page")
        os.ftruncate(fd, PAGE)
        page = mmap.mmap(fd, PAGE)
        client = Client(connection, page)
        struct.pack_into("=IIII", page, 0, MAGIC, VERSION, PAGE, 16)
        with self.lock:
            self.clients.append(client)
        while True:
            try:
                data = connection.recv(BYTES)
            except OSError:
                data = b""
            if len(data) != BYTES:
                break
            _, _, kind, sequence, status, slot, _ = HEADER.unpack_from(data)
            message = Message(kind, slot, sequence, status, data[32:])
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

    def _handle(self, client: Client, message: Message, fd: int) -> None:
        if message.type == HELLO:
            if self.refuse:
                client.send(ERROR, struct.pack("=II", 3, 0) + b"unknown tenant\0", sequence=message.sequence, status=3)
                return
            body = (struct.pack("=QII", 7, self.fail_mode, 50) + b"test-tenant\0").ljust(80, b"\0")
            body += struct.pack("=I", self.oversubscribe)
            head = HEADER.pack(MAGIC, VERSION, HELLO_REPLY, message.sequence, 0, 0xFFFFFFFF, 0)
            socket.send_fds(client.connection, [(head + body).ljust(BYTES, b"\0")], [fd])
        elif message.type == ATTACH:
            self._attach(client, message)
        elif message.type == REQUEST:
            self.queue.append(client)
            self._grant_next()
        elif message.type == RELEASE and self.holder is client and message.u32(76):
            self.holder = None
            client.slot(0, 0).value = 0
            self._grant_next()
        elif message.type == QUERY:
            limit = FOREVER if self.memory_limit is None else self.memory_limit
            body = struct.pack("=IIQQQQ", 0, 0, 0, 0, max(0, self.total_used), limit)
            client.send(MEMORY_REPLY, body, slot=0, sequence=message.sequence)
        elif message.type == MOVE_BACKING:
            memory = os.memfd_create("backing")
            os.ftruncate(memory, self.backing_there)
            body = struct.pack("=5QQ", 0, 0, 0, 0, 0, self.backing_bytes)
            head = HEADER.pack(MAGIC, VERSION, MOVE_BACKING_REPLY, message.sequence, 0, 0xFFFFFFFF, 0)
            fds = [memory] if self.backing_bytes else []
            socket.send_fds(client.connection, [(head + body).ljust(BYTES, b"\0")], fds)
            os.close(memory)
        elif message.type == MOVE_ROOM:
            status = self.room_answers.pop(0) if self.room_answers else 5
            client.send(MOVE_ROOM_REPLY, slot=0, sequence=message.sequence, status=status)
        elif message.type in (RESERVE, COMMIT, MEM_RELEASE):
            self._memory(client, message)

    def _attach(self, client: Client, message: Message) -> None:
        """A slot for each GPU, in the order in which they come; turns are given on the first only."""
        uuid = message.body[:16]
        if uuid in self.denied:
            client.send(GPU_REPLY, sequence=message.sequence, status=4)
            return
        slot = client.uuids.index(uuid) if uuid in client.uuids else len(client.uuids)
        if slot == len(client.uuids):
            client.uuids.append(uuid)
        for offset, value in ((16, self.inflight_ns), (24, self.idle_ns), (32, self.drain_ns)):
            client.slot(slot, offset).value = value
        client.slot(slot, 40).value = FOREVER if self.memory_limit is None else self.memory_limit
        client.flags(1 | self.flags, slot)
        client.send(GPU_REPLY, slot=slot, sequence=message.sequence)

    def _grant_next(self) -> None:
        if self.holder is not None or not self.queue or not self.granting:
            return
        client = self.queue.popleft()
        self.holder = client
        epoch = self.next_epoch
        self.next_epoch += 1
        deadline = FOREVER if self.turn_ns is None else time.monotonic_ns() + self.turn_ns
        client.slot(0, 8).value = deadline
        client.slot(0, 0).value = epoch
        client.epoch = epoch
        client.send(GRANT, struct.pack("=QQQ", epoch, deadline, self.inflight_ns), slot=0)

    def resume(self) -> None:
        with self.lock:
            self.granting = True
            self._grant_next()

    def revoke(self) -> None:
        with self.lock:
            assert self.holder is not None
            self.holder.slot(0, 0).value = 0
            self.holder.send(REVOKE, struct.pack("=Q", self.holder.epoch), slot=0)

    def set_flags(self, flags: int) -> None:
        for client in self.clients:
            client.flags(1 | flags)
            client.send(UPDATE, slot=0)

    def move(self, kind: int, bytes_: int, *, base: int = 0, span: int = 0, client: int = 0) -> Message:
        """Order a move and wait for its end."""
        to = self.clients[client]
        before = len(to.of(MOVE_DONE))
        to.send(kind, struct.pack("=QQQ", bytes_, base, span or self.backing_bytes), slot=0, sequence=1000 + before)
        deadline = time.monotonic() + 20
        while len(to.of(MOVE_DONE)) == before:
            assert time.monotonic() < deadline, "the move did not end"
            time.sleep(0.002)
        return to.of(MOVE_DONE)[-1]

    def _memory(self, client: Client, message: Message) -> None:
        reservation, count = message.u64(8), message.u64(16)
        family = message.u32(0)
        if family == 8:
            if message.type == RESERVE:
                client.send(MEMORY_REPLY, sequence=message.sequence)
            return
        mine = self.used.get(id(client), 0)
        if message.type == RESERVE:
            count += self.context_bytes if family == 7 else 0
            refused = self.memory_limit is not None and self.total_used + count > self.memory_limit
            number = self.next_reservation
            self.next_reservation += 1
            if not refused:
                self.reservations[number] = count
                self.used[id(client)] = mine + count
            body = struct.pack("=IIQ", 0, 0, number)
            client.send(MEMORY_REPLY, body, slot=0, sequence=message.sequence, status=5 * refused)
        elif message.type == COMMIT:
            kept = self.context_bytes if family == 7 else count
            self.used[id(client)] = mine + kept - self.reservations.pop(reservation, 0)
        else:
            self.used[id(client)] = mine - (self.context_bytes if family == 7 else count)
        for each in self.clients:
            each.slot(0, 48).value = max(0, self.total_used)
