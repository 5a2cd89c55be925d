"""A shim without CUDA: speaks the wire protocol from Python, so that the agent is tested apart from the C side."""

from __future__ import annotations

import array
import mmap
import os
import select
import socket
import time
from pathlib import Path
from typing import Any

from cotenant.abi.protocol import BODY_OF, MESSAGE_BYTES, NO_SLOT, MessageType
from cotenant.abi.tenant_page import PAGE_BYTES, PageLayout
from cotenant.agent.ipc import wire

WITHIN_S = 60.0  # tests run this module in processes that have no other helpers


class FakeShim:
    """One connection to an agent. Blocking; every wait has an end."""

    def __init__(self, folder: Path, token: str = "", *, hello: bool = True, **fields: Any) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self.socket.connect(str(folder / "agent.sock"))
        self.sequence = 0
        self.page: PageLayout | None = None
        self.answer: dict[str, Any] = {}
        if hello:
            self.hello(token, **fields)

    def hello(self, token: str, **fields: Any) -> dict[str, Any]:
        values = {"pid": os.getpid(), "token": token.encode(), "program": b"fake", "shim_version": 1} | fields
        self.send(MessageType.HELLO, values)
        data, control, _flags, _ = self.socket.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(16))
        if not data:
            self.answer = {"type": 0}
            return self.answer
        self.answer = self.parse(data)
        for level, kind, payload in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(payload[:4])
                self.page = PageLayout.from_buffer(mmap.mmap(fds[0], PAGE_BYTES))
                os.close(fds[0])
        return self.answer

    @staticmethod
    def parse(data: bytes) -> dict[str, Any]:
        head = wire.parse_head(data)
        found: dict[str, Any] = {"type": head.type, "sequence": head.sequence, "status": head.status, "slot": head.slot}
        name = BODY_OF.get(head.type)
        if name:
            found |= wire.fields(name, data)
        if name == "text":
            found["text"] = wire.text_of(found["text"])
        return found

    def send(self, kind: MessageType, values: dict[str, Any] | None = None, slot: int = NO_SLOT) -> int:
        self.sequence += 1
        self.socket.send(wire.pack(kind, values, sequence=self.sequence, slot=slot, sent_ns=time.monotonic_ns()))
        return self.sequence

    def receive(self, seconds: float = WITHIN_S) -> dict[str, Any]:
        """The next message; {} when none came in time, type 0 when the agent closed."""
        if not select.select([self.socket], [], [], seconds)[0]:
            return {}
        try:
            data = self.socket.recv(MESSAGE_BYTES + 1)
        except ConnectionResetError:
            data = b""
        return self.parse(data) if data else {"type": 0}

    def wait(self, kind: MessageType, seconds: float = WITHIN_S) -> dict[str, Any]:
        """The next message of a type; others are passed over."""
        deadline = time.monotonic() + seconds
        while True:
            message = self.receive(max(0.0, deadline - time.monotonic()))
            assert message, f"no {kind.name} within {seconds} s"
            assert message["type"] != 0, f"the agent closed the connection before {kind.name}"
            if message["type"] == kind:
                return message

    def attach(self, uuid: bytes) -> int:
        self.send(MessageType.GPU_ATTACH, {"uuid": uuid, "total_bytes": 8 << 30, "name": b"Test GPU"})
        reply = self.wait(MessageType.GPU_REPLY)
        assert reply["status"] == 0, reply
        return int(reply["slot"])

    def request(self, slot: int = 0, burst_ns: int = 0) -> None:
        self.send(MessageType.TOKEN_REQUEST, {"burst_ns": burst_ns}, slot)

    def take(self, slot: int = 0, seconds: float = WITHIN_S) -> dict[str, Any]:
        """Request and wait for the grant."""
        self.request(slot)
        return self.wait(MessageType.TOKEN_GRANT, seconds)

    def release(self, epoch: int, slot: int = 0, *, more: bool = False, reason: int = 1, drained: bool = True) -> None:
        values = {
            "epoch": epoch,
            "drained_ns": time.monotonic_ns(),
            "reason": reason,
            "drained": int(drained),
            "wants_more": int(more),
        }
        self.send(MessageType.TOKEN_RELEASE, values, slot)

    def reserve(self, size: int, slot: int = 0, family: int = 1) -> dict[str, Any]:
        self.send(MessageType.MEMORY_RESERVE, {"family": family, "bytes": size}, slot)
        return self.wait(MessageType.MEMORY_REPLY)

    def commit(self, reservation: int, size: int, slot: int = 0, family: int = 1) -> None:
        self.send(MessageType.MEMORY_COMMIT, {"family": family, "reservation": reservation, "bytes": size}, slot)

    def close(self) -> None:
        self.socket.close()


def register(client: Any, name: str, **share: Any) -> dict[str, Any]:
    """Register a tenant as a launcher does; the tenant lives while `client` is open."""
    answer: dict[str, Any] = client.call("register", tenant={"name": name} | share)
    return answer
