"""HTTP/1.1 on an event loop with minimal overhead: a parser in C and one object per request.

Decision 0080 says why it is not an ASGI server. Pipelined requests are answered in order. All waits are limited: for a
request to arrive, for an answer to be read, for an idle connection.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import cast

import httptools

_HEADS = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n".encode() for each in HTTPStatus}
MOST_HEADERS, MOST_HEADER_BYTES, MOST_URL = 100, 32 << 10, 8 << 10
PIPELINED = 64
# After an error that ends the connection, what the client still sends is read and dropped for this long: closed with
# unread bytes, the connection would be reset, and the client could lose the answer.
LINGER_S = 10.0
JSON = b"content-type: application/json\r\n"


@dataclass(frozen=True)
class HttpLimits:
    """Limits of HTTP connections: bytes of a body; seconds for a request to arrive, for an answer to be read, and of
    idleness.
    """

    body_bytes: int = 64 << 20
    read_s: float = 30.0
    write_s: float = 30.0
    idle_s: float = 300.0
    connections: int = 20_000


def _nothing() -> None:
    """Does nothing."""


def _ignored(full: bool) -> None:
    """Does nothing; used for short answers, whose writer need not know that the client is slow."""


def head_of(status: int) -> bytes:
    """Return the status line of an HTTP answer with this status."""
    return _HEADS.get(status) or b"HTTP/1.1 %d \r\n" % status


class Exchange:
    """One request and its answer. Header names are lower case. `withdraw` is called if the client disconnects before
    the end of its answer. `slow(True)` is called if the client reads a streamed answer too slowly, and `slow(False)`
    when it has caught up. `more`: header lines of its answer, whatever this is.
    """

    __slots__ = (
        "body", "chunked", "connection", "headers", "keep_alive", "method", "more", "output", "slow", "streaming",
        "url", "withdraw",
    )  # fmt: skip

    def __init__(self, connection: Connection, url: bytes) -> None:
        self.connection, self.url = connection, url
        self.method = self.more = b""
        self.headers: dict[bytes, bytes] = {}
        self.body: bytes = b""
        self.keep_alive = True
        self.output: tuple[bytes, bytes] | None = None
        self.withdraw = _nothing
        self.slow = _ignored
        self.streaming = self.chunked = False

    def respond(self, status: int, body: bytes = b"", headers: bytes = JSON) -> None:
        """Send the answer; `headers` are lines including their ends. A second answer is ignored."""
        if self.output is not None or self.streaming:
            return
        ending = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        head = b"%scontent-length: %d\r\n%s%s%s" % (head_of(status), len(body), headers, self.more, ending)
        self.output = (head, b"" if self.method == b"HEAD" else body)
        self.connection.flush()

    def begin(self, status: int, headers: bytes) -> bool:
        """Start a streamed answer, continued by `send` and finished by `end` or `cut`. Returns False, with nothing
        written, if answers to earlier requests on the connection are due first, or if this request already has an
        answer.
        """
        connection = self.connection
        if self.output is not None or not connection.queue or connection.queue[0] is not self:
            return False
        self.streaming = True
        self.chunked = connection.parser.get_http_version() != "1.0"
        if not self.chunked:
            self.keep_alive = False
        ending = b"transfer-encoding: chunked\r\n" if self.chunked else b""
        ending += b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        connection.transport.write(head_of(status) + headers + self.more + ending)
        return True

    def send(self, data: bytes) -> None:
        """Send a piece of a streamed answer; the piece must not be empty."""
        if self.streaming:
            self.connection.transport.write(b"%x\r\n%s\r\n" % (len(data), data) if self.chunked else data)

    def end(self) -> None:
        """End the streamed answer, which is complete."""
        if self.streaming:
            self.streaming = False
            self.output = (b"0\r\n\r\n" if self.chunked else b"", b"")
            self.connection.flush()

    def cut(self) -> None:
        """Abort a streamed answer that cannot be completed: the client sees the connection break."""
        if self.streaming:
            self.streaming = False
            self.connection.transport.abort()

    def stream(self, headers: bytes) -> asyncio.Transport | None:
        """Answer with whatever is written to the transport until it is closed; None unless this request is the next to
        be answered.
        """
        connection = self.connection
        if self.output is not None or not connection.queue or connection.queue[0] is not self:
            return None
        connection.leave()
        connection.transport.write(b"HTTP/1.1 200 OK\r\n" + headers + b"connection: close\r\n\r\n")
        return connection.transport


Handler = Callable[[Exchange], None]


class Connection(asyncio.Protocol):
    """One client connection. `deadline`: the time at which the connection is closed; inf while the client waits for the
    server."""

    __slots__ = (
        "_bytes", "_chunks", "_current", "_ended", "_header_bytes", "_lingers", "_over", "_paused", "deadline", "front",
        "parser", "queue", "size", "transport",
    )  # fmt: skip

    def __init__(self, front: HttpFront) -> None:
        self.front = front
        self.queue: deque[Exchange] = deque()
        self.parser = httptools.HttpRequestParser(self)
        self.deadline = 0.0
        self._current: Exchange | None = None
        self._chunks: list[bytes] = []
        self.size = self._header_bytes = 0
        self._over = self._paused = self._ended = self._lingers = False

    # ---- asyncio ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # a cast instead of a check, because uvloop's transports are not of this class
        self.transport = cast(asyncio.Transport, transport)
        if len(self.front.connections) >= self.front.limits.connections:
            self.front.refused += 1
            self._over = True
            self.transport.abort()
            return
        self.front.connections.add(self)
        self.deadline = time.monotonic() + self.front.limits.idle_s

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the connection has ended. Its running requests continue; their answers are dropped."""
        self._over = True
        gone = list(self.queue)
        self.queue.clear()
        self.front.connections.discard(self)
        for exchange in gone:
            exchange.withdraw()

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        if self._current is None and not self.queue:
            self.deadline = time.monotonic() + self.front.limits.read_s
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._bad(501, b"no other protocol is spoken here")
        except httptools.HttpParserCallbackError:
            if not self._over:
                self._bad(400, b"not a request that can be understood")
        except httptools.HttpParserError:
            self._bad(400, b"not HTTP/1.1")

    def eof_received(self) -> bool:
        """Called when the client has closed its sending side; it may have given up or may still wait. Requests of this
        connection that have not begun are refused; running ones are answered.
        """
        if self._current is not None and not self._over:
            self._ended = True
            self._bad(400, b"the request ended before its body was complete")
        if not self.queue or self._over:
            return False
        self._over = True
        self.queue[-1].keep_alive = False
        for exchange in list(self.queue):
            if exchange.output is None:
                exchange.withdraw()
        return True

    def pause_writing(self) -> None:
        """Called when the client reads too slowly: stops reading from it, for a limited time."""
        self._paused = True
        self.deadline = time.monotonic() + self.front.limits.write_s
        self.transport.pause_reading()
        if self.queue:
            self.queue[0].slow(True)

    def resume_writing(self) -> None:
        self._paused = False
        self.transport.resume_reading()
        if self.queue:
            self.deadline = float("inf")
            self.queue[0].slow(False)
        self._rest()

    # ---- parser ----

    def on_message_begin(self) -> None:
        self._current = Exchange(self, b"")
        self._chunks.clear()
        self.size = self._header_bytes = 0

    def on_url(self, url: bytes) -> None:
        assert self._current is not None
        self._current.url += url
        if len(self._current.url) > MOST_URL:
            self._bad(414, b"the URL is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        current = self._current
        if current is None:
            return
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MOST_HEADER_BYTES or len(current.headers) >= MOST_HEADERS:
            self._bad(431, b"the headers are too large")
            return
        current.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        current = self._current
        if current is None:
            return
        current.method = self.parser.get_method()
        current.keep_alive = self.parser.should_keep_alive()
        headers = current.headers
        length = headers.get(b"content-length")
        if length is not None and int(length) > self.front.limits.body_bytes:
            self._too_large()
        elif headers.get(b"expect", b"").lower() == b"100-continue" and not self.queue:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if self._current is None:
            return
        self.size += len(body)
        if self.size > self.front.limits.body_bytes:
            self._too_large()
            return
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        current, self._current = self._current, None
        if current is None or self._over:
            return
        chunks = self._chunks
        if chunks:
            current.body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            chunks.clear()
        self.queue.append(current)
        self.deadline = float("inf")
        if len(self.queue) >= PIPELINED:
            self.transport.pause_reading()
        if self.front.draining:
            current.keep_alive = False
        try:
            self.front.handler(current)
        except Exception as error:
            self.front.failed(error)
            current.respond(500, self.front.error_body(500, "the server failed on this request"))

    # ---- answers ----

    def flush(self) -> None:
        """Write the answers that can be sent now: answers leave in the order of the requests on the connection."""
        queue = self.queue
        while queue and queue[0].output is not None:
            done = queue.popleft()
            assert done.output is not None
            head, body = done.output
            if len(body) < 65536:
                self.transport.write(head + body)
            else:
                self.transport.write(head)
                self.transport.write(body)
            if not done.keep_alive:
                self._over = True
                queue.clear()
                if self._lingers:
                    self.deadline = time.monotonic() + LINGER_S
                    if self.transport.can_write_eof():  # not with TLS: the client knows the length of the answer
                        self.transport.write_eof()
                else:
                    self.transport.close()
                return
        if not queue:
            self._rest()
        elif len(queue) == PIPELINED - 1 and not self._paused:
            self.transport.resume_reading()

    def leave(self) -> None:
        """Begin a streamed answer: read nothing more from the client, and leave timeouts to the writer of the
        stream."""
        self.queue.clear()
        self._over = True
        self.deadline = float("inf")

    def _rest(self) -> None:
        if self._over or self._paused or self.queue:
            return
        limits = self.front.limits
        self.deadline = time.monotonic() + (limits.idle_s if self._current is None else limits.read_s)

    def _bad(self, status: int, why: bytes) -> None:
        """Send an error in answer to a request that is refused before it is processed (one that is malformed, too large
        or too slow, for example), and close the connection.
        """
        current = self._current or Exchange(self, b"")
        self._current = None
        if self._over:
            return
        current.keep_alive = False
        self._lingers = not self._ended
        self.queue.append(current)
        current.respond(status, self.front.error_body(status, why.decode()))
        self._over = True

    def _too_large(self) -> None:
        self._bad(413, b"the body is over the limit of %d bytes" % self.front.limits.body_bytes)

    def expire(self) -> None:
        """Called when the deadline of the connection has passed. Answers a client that is still sending, and
        disconnects one that does not read.
        """
        if self._paused or self._current is None or self.queue:
            self.transport.abort() if self._paused else self.transport.close()
            return
        self._bad(408, b"the request did not arrive in time")


def plain_error(status: int, why: str) -> bytes:
    """The body of an answer with an error."""
    return b'{"error":"%s"}' % why.encode()


class HttpFront:
    """All HTTP connections of a server. `error_body` makes the answers to requests that never reach the handler."""

    def __init__(
        self, handler: Handler, limits: HttpLimits, failed: Callable[[BaseException], None],
        error_body: Callable[[int, str], bytes] = plain_error,
    ) -> None:  # fmt: skip
        self.handler, self.limits, self.failed, self.error_body = handler, limits, failed, error_body
        self.connections: set[Connection] = set()
        self.refused = 0
        self.draining = False

    def protocol(self) -> Connection:
        """Create the object of a new connection; passed to loop.create_server."""
        return Connection(self)

    def sweep(self) -> None:
        """Close connections past their deadline. Called about once a second."""
        now = time.monotonic()
        for connection in [c for c in self.connections if c.deadline < now]:
            connection.expire()

    def drain(self) -> None:
        """Close idle connections; all other connections close after their answers."""
        self.draining = True
        for connection in list(self.connections):
            if connection.queue:
                for exchange in connection.queue:
                    exchange.keep_alive = False
            else:
                connection.transport.close()

    def abort(self) -> None:
        """Close all connections at once."""
        for connection in list(self.connections):
            connection.transport.abort()
