"""Sends requests over HTTP/1.1. Connections are opened on demand, kept and reused, with one request at a time."""

from __future__ import annotations

import errno
import os
import re
import select
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cotenant.core.errors import WorkError
from cotenant.loadgen.loop import DROPPED, FAILED, FULL, OK, Loop, reason_of
from cotenant.loadgen.payload import Payload
from cotenant.loadgen.target import Target

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection:[ \t]*close", re.IGNORECASE)
_EXECUTED = re.compile(rb"\r\ncotenant-executed-ms:[ \t]*([0-9.]+)", re.IGNORECASE)
_OUTCOME = re.compile(rb"\r\ncotenant-outcome:[ \t]*(\w+)", re.IGNORECASE)
_OUTCOMES = {b"late": DROPPED, b"dropped": DROPPED, b"full": FULL, b"unavailable": FAILED, b"failed": FAILED}
RECEIVE = 1 << 16
FREE = -1
WARM = 8  # connections that are opened before the first request


@dataclass
class _Answer:
    status: int
    head: bytes
    body: bytes
    close: bool


class Parser:
    """Parses answers from received bytes. It supports as much of HTTP/1.1 as servers use in answers to POST."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._need = 0  # number of bytes of the answer's body that are still missing; 0: the head is incomplete

    def __bool__(self) -> bool:
        return bool(self._buffer)

    def feed(self, data: bytes) -> _Answer | None:
        """Parse received bytes. Returns the next answer; None until it is complete. Raises ValueError for bytes that
        are not HTTP.
        """
        buffer = self._buffer
        buffer += data
        if len(buffer) < self._need:
            return None
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(buffer) > RECEIVE:
                raise ValueError("a response head without an end")
            return None
        head = bytes(buffer[: end + 2])
        if not head.startswith(b"HTTP/1."):
            raise ValueError("not HTTP/1.1")
        length = _LENGTH.search(head)
        if length is not None:
            self._need = end + 4 + int(length.group(1))
            if len(buffer) < self._need:
                return None
            body = bytes(buffer[end + 4 : self._need])
        elif _CHUNKED.search(head):
            whole = self._chunks(end + 4)
            if whole is None:
                return None
            body = whole
        else:
            self._need, body = end + 4, b""
        del buffer[: self._need]
        self._need = 0
        return _Answer(int(head[9:12]), head, body, _CLOSE.search(head) is not None)

    def _chunks(self, at: int) -> bytes | None:
        parts: list[bytes] = []
        while True:
            end = self._buffer.find(b"\r\n", at)
            if end < 0:
                return None
            size = int(bytes(self._buffer[at:end]).split(b";")[0], 16)
            at = end + 2
            if len(self._buffer) < at + size + 2:
                return None
            if size == 0:
                self._need = at + 2
                return b"".join(parts)
            parts.append(bytes(self._buffer[at : at + size]))
            at += size + 2


class Connection:
    """One HTTP connection; `index` is the request that it carries, or FREE."""

    def __init__(self, owner: HttpTransport) -> None:
        self.owner = owner
        self.index = FREE
        self.svc = 0
        self.parser = Parser()
        self.out = b""
        self.socket, self.connecting = owner.connect()
        self.fd = self.socket.fileno()
        owner.loop.watch(self.fd, self.ready, select.EPOLLIN | (select.EPOLLOUT if self.connecting else 0))

    def send(self, index: int, svc: int, data: bytes) -> None:
        """Send a request on this connection; bytes that the kernel does not accept now are sent when the socket is
        writable.
        """
        self.index, self.svc = index, svc
        if self.connecting:
            self.out = data
            return
        try:
            taken = self.socket.send(data)
        except (BlockingIOError, ssl.SSLWantWriteError):
            taken = 0
        except OSError as error:
            self.owner.broken(self, error)
            return
        self.owner.loop.sent(index)
        if taken < len(data):
            self.out = data[taken:]
            self.owner.loop.rewatch(self.fd, select.EPOLLIN | select.EPOLLOUT)

    def ready(self, events: int) -> None:
        """Handle the connection's socket when it is readable or writable."""
        if self.connecting:
            self._connected()
            if self.fd < 0:
                return
        if events & select.EPOLLOUT and self.out:
            self._push()
            if self.fd < 0:
                return
        if events & ~select.EPOLLOUT:
            self._pull()

    def _connected(self) -> None:
        """Handle the success or failure of connecting, and send the request that waited for it."""
        code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self.owner.broken(self, OSError(code, os.strerror(code)))
            return
        self.connecting = False
        self.owner.loop.rewatch(self.fd, select.EPOLLIN)
        if self.index != FREE:
            data, self.out = self.out, b""
            self.send(self.index, self.svc, data)

    def _push(self) -> None:
        try:
            taken = self.socket.send(self.out)
        except (BlockingIOError, ssl.SSLWantWriteError):
            return
        except OSError as error:
            self.owner.broken(self, error)
            return
        self.out = self.out[taken:]
        if not self.out:
            self.owner.loop.rewatch(self.fd, select.EPOLLIN)

    def _pull(self) -> None:
        while True:
            try:
                data = self.socket.recv(RECEIVE)
            except (BlockingIOError, ssl.SSLWantReadError):
                return
            except OSError as error:
                self.owner.broken(self, error)
                return
            if not self._read(data):
                return
            if len(data) < RECEIVE and not isinstance(self.socket, ssl.SSLSocket):
                return

    def _read(self, data: bytes) -> bool:
        """Process received bytes; empty bytes mean the end of the stream. Returns whether to read on."""
        if not data:
            self.owner.broken(self, None)
            return False
        try:
            answer = self.parser.feed(data)
        except ValueError as error:
            self.owner.broken(self, error)
            return False
        if answer is not None:
            self.owner.answered(self, answer)
        return answer is None

    def shut(self) -> None:
        """Close it."""
        self.owner.loop.unwatch(self.fd)
        self.fd = -1
        self.socket.close()


class HttpTransport:
    """A Transport over up to `most` connections. A request without a free connection waits for one, and is recorded
    as sent late."""

    def __init__(self, target: Target, payloads: Sequence[Payload], most: int) -> None:
        self.target, self.payloads, self.most, self.warm = target, payloads, most, min(WARM, most)
        self.loop: Loop
        self.free: list[Connection] = []
        self.busy: dict[int, Connection] = {}
        self.waiting: deque[tuple[int, int]] = deque()
        self.count = 0
        self.peak = 0
        self.context = target.ssl_context()
        # address family and address of the first connection, which further connections use, too
        self.peer: tuple[int, Any] | None = None

    def connect(self) -> tuple[socket.socket, bool]:
        """Return a new non-blocking socket, and whether it is still connecting. The first connections, and those with
        TLS, are established before return, so that a missing server is noticed before requests are sent. Raises OSError
        if the server refuses the connection.
        """
        if self.peer is not None and self.context is None:
            made = socket.socket(self.peer[0], socket.SOCK_STREAM)
            made.setblocking(False)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = made.connect_ex(self.peer[1])
            if code not in (0, errno.EINPROGRESS):
                made.close()
                raise OSError(code, os.strerror(code))
            return made, code != 0
        made = socket.create_connection((self.target.host, self.target.port), timeout=10.0)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found = (made.family, made.getpeername())
        if self.context is not None:
            made = self.context.wrap_socket(made, server_hostname=self.target.host)
        made.setblocking(False)
        if self.count + 1 >= self.warm:
            self.peer = found
        return made, False

    def open(self, loop: Loop) -> None:
        """Open the first connections. Raises WorkError if the server cannot be reached."""
        self.loop = loop
        try:
            for _ in range(self.warm):
                self.free.append(self._new())
        except OSError as error:
            raise WorkError(f"cannot reach {self.target}: {error.strerror or error}") from None

    def _new(self) -> Connection:
        made = Connection(self)
        self.count += 1
        self.peak = max(self.peak, self.count)
        return made

    def send(self, index: int, svc: int) -> None:
        if self.free:
            # the connection that was used last is taken: its buffers are in the CPU's caches, and the server may close
            # idle connections
            connection = self.free.pop()
        elif self.count < self.most:
            try:
                connection = self._new()
            except OSError as error:
                self.loop.finish(index, FAILED, reason=reason_of(error))
                return
        else:
            self.waiting.append((index, svc))
            return
        self.busy[index] = connection
        connection.send(index, svc, self.data(index, svc))

    def data(self, index: int, svc: int) -> bytes:
        """Return head and body of request number `index`."""
        return self.payloads[svc].request(index)

    def answered(self, connection: Connection, answer: _Answer) -> None:
        """Handle a complete answer to the connection's request."""
        index, svc = connection.index, connection.svc
        if index == FREE:
            self.loop.stray += 1
            self._drop(connection)
            return
        del self.busy[index]
        connection.index = FREE
        if answer.close or connection.parser or connection.out:
            # there are bytes after the answer, or the answer came before the request was sent; either way, the
            # connection is not reused
            self.loop.stray += bool(connection.parser)
            self._drop(connection)
        else:
            self.free.append(connection)
        self._judge(index, svc, answer)
        if self.waiting:
            self._next()

    def _judge(self, index: int, svc: int, answer: _Answer) -> None:
        if answer.status == 200:
            took = _EXECUTED.search(answer.head)
            if self.payloads[svc].belongs(index, answer.body):
                self.loop.finish(index, OK, float(took.group(1)) if took else -1.0)
            else:
                self.loop.wrong += 1
                self.loop.finish(index, FAILED, reason="the answer belongs to another request or model")
            return
        named = _OUTCOME.search(answer.head)
        if named is not None:
            outcome = _OUTCOMES.get(named.group(1).lower(), FAILED)
        else:
            outcome = {429: FULL, 503: DROPPED}.get(answer.status, FAILED)
        self.loop.finish(index, outcome, reason=f"status {answer.status}" if outcome == FAILED else "")

    def _next(self) -> None:
        index, svc = self.waiting.popleft()
        self.send(index, svc)

    def broken(self, connection: Connection, error: Exception | None) -> None:
        """Handle the end of a connection. A server may close an idle connection; if the connection carried a request,
        the request has failed."""
        index = connection.index
        connection.index = FREE
        self._drop(connection)
        if index == FREE:
            return
        del self.busy[index]
        self.loop.finish(index, FAILED, reason=reason_of(error))
        if self.waiting:
            self._next()

    def _drop(self, connection: Connection) -> None:
        if connection in self.free:
            self.free.remove(connection)
        connection.shut()
        self.count -= 1

    def expire(self, index: int) -> None:
        connection = self.busy.pop(index, None)
        if connection is not None:
            connection.index = FREE
            self._drop(connection)
        else:
            self.waiting = deque(x for x in self.waiting if x[0] != index)
        if self.waiting and self.count < self.most:
            self._next()

    def close(self) -> None:
        for connection in [*self.free, *self.busy.values()]:
            connection.shut()
        self.free, self.busy = [], {}
