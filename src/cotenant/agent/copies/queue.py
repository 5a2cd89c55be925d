"""Copy scheduling for programs that copy without the shim: it uses the shim's copy page (the shared memory in which a
GPU's tenants queue copies) and the shim's compiled scheduling rule.

A program requests a turn for each chunk, copies the chunk, and returns the turn:

    queue = CopyQueue(page_fd, queue=3, participant=7)
    for chunk in chunks:
        with queue.turn(TO_DEVICE, chunk.nbytes, more=chunk is not chunks[-1]):
            copy(chunk)          # returns when the chunk has been copied
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cotenant.abi.copy_page import COPY_PAGE_BYTES, CopyPageLayout
from cotenant.abi.protocol import MESSAGE_BYTES, NO_SLOT, PROTOCOL_VERSION, MessageType
from cotenant.abi.rules import CopyTicket
from cotenant.core.errors import WorkError
from cotenant.native.rules import library

TO_DEVICE, TO_HOST = 0, 1
SPIN_S = 40e-6
NAP_S = 20e-6
RESCUE_S = 2.0


class CopyQueue:
    """The queue of this process's tenant on a GPU's copy page. The agent supplies the page (`fd`), the queue's number,
    and `participant`, the number of this process on the page.
    """

    def __init__(self, fd: int, queue: int, participant: int) -> None:
        self.queue, self.participant = queue, participant
        self._map = mmap.mmap(fd, COPY_PAGE_BYTES)
        self.layout = CopyPageLayout.from_buffer(self._map)
        if self.layout.magic == 0 or self.layout.page_bytes != COPY_PAGE_BYTES:
            raise WorkError("the agent's copy page has another version than this program: use the same release of both")
        self._page = ctypes.addressof(self.layout)
        self._rule = library()

    @property
    def chunk_bytes(self) -> int:
        """Size of the chunks into which a copy is split while other tenants copy, too."""
        return int(self.layout.chunk_bytes)

    def ask(self, direction: int, size: int, now_ns: int | None = None) -> CopyTicket | None:
        """Request a turn to copy a chunk. Returns None if another tenant goes first: then request again within a few
        milliseconds, or call `withdraw`.
        """
        ticket = CopyTicket()
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        place = (self._page, direction, self.queue, self.participant, size, now_ns, ctypes.byref(ticket))
        return ticket if self._rule.queue_try(*place) else None

    def piece_bytes(self, direction: int, now_ns: int | None = None) -> int:
        """Size of the pieces into which a copy should be split now: that of a chunk, or more while no other tenant
        copies.
        """
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        return int(self._rule.queue_piece(self._page, direction, self.queue, now_ns))

    def done(self, direction: int, ticket: CopyTicket) -> None:
        """Return a turn after its chunk has been copied, so that another tenant's chunk may be copied over the link."""
        self._rule.queue_done(self._page, direction, ctypes.byref(ticket))

    def withdraw(self, direction: int) -> None:
        """Stop waiting for a turn to copy a chunk."""
        self._rule.queue_withdraw(self._page, direction, self.queue)

    def charge(self, direction: int, size: int) -> None:
        """Charge a small copy, which needs no turn, to this process's queue."""
        self._rule.queue_charge(self._page, direction, self.queue, size)

    @contextlib.contextmanager
    def turn(self, direction: int, size: int, *, more: bool = False) -> Iterator[None]:
        """Wait for a turn to copy one chunk, and return the turn at the end. `more`: the copy has further chunks."""
        began = time.monotonic()
        while (ticket := self.ask(direction, size)) is None:
            if time.monotonic() - began > RESCUE_S:
                self._rule.queue_rescue(self._page, direction, self.queue, time.monotonic_ns())
            if time.monotonic() - began > SPIN_S:
                time.sleep(NAP_S)
        if not more:
            self.withdraw(direction)
        try:
            yield
        finally:
            self.done(direction, ticket)

    def close(self) -> None:
        """Unmap the copy page."""
        del self.layout
        self._map.close()


def join(agent_socket: Path | str, token: str, gpu_uuid: bytes) -> tuple[CopyQueue, Any] | None:
    """Connect this process to an agent as a process of the tenant with this token, to schedule its copies on a GPU.

    Returns the queue and the connection, which must stay open while the queue is used; None if copies are not scheduled
    on that GPU. Raises WorkError if the agent refuses or does not answer.
    """
    import os
    import socket

    from cotenant.agent.ipc import wire

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)

    def exchange(kind: MessageType, fields: dict[str, Any] | None, slot: int = NO_SLOT) -> tuple[bytes, list[int]]:
        connection.send(wire.pack(kind, fields, sequence=int(kind), slot=slot))
        while True:
            data, fds, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 4)
            if not data:
                raise WorkError(f"the agent at {agent_socket} closed the connection")
            head = wire.parse_head(data)
            if head.type == MessageType.ERROR:
                raise WorkError(wire.text_of(wire.fields("text", data)["text"]))
            if head.sequence == int(kind):
                return data, list(fds)
            for fd in fds:
                os.close(fd)

    try:
        connection.connect(str(agent_socket))
        hello = {"pid": os.getpid(), "token": token.encode(), "program": b"copy queue"}
        hello["shim_version"] = PROTOCOL_VERSION
        _, fds = exchange(MessageType.HELLO, hello)
        for fd in fds:
            os.close(fd)  # this descriptor is the connection's shared page, which only the shim needs
        reply, _ = exchange(MessageType.GPU_ATTACH, {"uuid": gpu_uuid, "name": b""})
        slot = wire.parse_head(reply).slot
        data, fds = exchange(MessageType.COPY_ATTACH, None, slot)
        terms = wire.fields("copies", data)
        if not fds:
            connection.close()
            return None
        queue = CopyQueue(fds[0], terms["queue"], terms["participant"])
        for fd in fds:
            os.close(fd)
    except OSError as error:
        connection.close()
        raise WorkError(f"no agent answers at {agent_socket} ({error.strerror or error})") from None
    return queue, connection
