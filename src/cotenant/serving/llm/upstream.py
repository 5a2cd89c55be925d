"""Requests to one program over HTTP/1.1, on connections that are kept: what comes back is handed on as it comes.

Callbacks and a parser in C, as on the other side (decision 0138 has the measurement against an ordinary client).
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

import httptools

MOST_KEPT = 256
CONNECT_S = 10.0


class Receiver(Protocol):
    """What becomes of one request. `got_end` or `got_fault` comes last, once."""

    def got_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """The status and the headers, their names in lower case."""

    def got_body(self, data: bytes) -> None:
        """A piece of the body, as large as it came."""

    def got_end(self) -> None:
        """The answer is whole."""

    def got_fault(self, why: str) -> None:
        """There is no answer, or not all of it."""


class Link(asyncio.Protocol):
    """One connection to the program. One request at a time."""

    __slots__ = ("_chunks", "_headers", "_parser", "_receiver", "_sized", "_upstream", "kept", "transport")

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._receiver: Receiver | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._chunks: list[bytes] = []
        self._sized = False
        self.kept = False  # from an earlier request: the program may just be closing it

    def ask(self, request: bytes, receiver: Receiver) -> None:
        """Send a request."""
        self._receiver = receiver
        self._parser = httptools.HttpResponseParser(self)
        self.transport.write(request)

    def abandon(self) -> None:
        """Nobody wants the answer any more: the program sees its client go."""
        self._receiver = None
        self.transport.abort()

    def slow(self, full: bool) -> None:
        """Take no more from the program for now (True), or go on."""
        if not self.transport.is_closing():
            self.transport.pause_reading() if full else self.transport.resume_reading()

    # ---- asyncio ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol. All that one read brought is handed on in one piece."""
        if self._receiver is None:  # unasked, or after the end
            self.transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fault("its answer is not HTTP/1.1")
            self.transport.abort()
            return
        self._hand_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._upstream.lost(self)
        if self._receiver is not None and self._headers and not self._sized:
            self._hand_on()
            self._end()  # an answer that ends with its connection
        self._fault("it closed the connection" if exc is None else f"the connection broke: {exc}")

    def _fault(self, why: str) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.got_fault(why)

    def _hand_on(self) -> None:
        if self._chunks and self._receiver is not None:
            data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
            self._chunks.clear()
            self._receiver.got_body(data)

    def _end(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.got_end()

    # ---- parser ----

    def on_message_begin(self) -> None:
        """See httptools."""
        self._headers, self._sized = [], False
        self._chunks.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        name = name.lower()
        self._headers.append((name, value))
        if name in (b"content-length", b"transfer-encoding"):
            self._sized = True

    def on_headers_complete(self) -> None:
        """See httptools."""
        status = self._parser.get_status_code()
        if status >= 200 and self._receiver is not None:
            self._receiver.got_head(status, self._headers)

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        if self._parser.get_status_code() < 200:  # 100 Continue: the answer is still to come
            return
        self._hand_on()
        keep = self._parser.should_keep_alive() and self._sized
        self._headers = []
        self._end()
        if keep and not self.transport.is_closing():
            self.transport.resume_reading()
            self._upstream.free(self)
        else:
            self.transport.close()


class Upstream:
    """All connections to one program. One event loop uses it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.host = f"127.0.0.1:{port}".encode()
        self._free: list[Link] = []
        self._links: set[Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, request: bytes, receiver: Receiver, begun: Begun, *, fresh: bool = False) -> None:
        """Send a whole request, `fresh` on a new connection. `begun` is given the connection, now or later, unless
        there is a fault first."""
        while self._free and not fresh:
            link = self._free.pop()
            if not link.transport.is_closing():
                begun(link)
                link.ask(request, receiver)
                return
        task = asyncio.get_running_loop().create_task(self._connect(request, receiver, begun))
        self._tasks.add(task)

        def connected(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if task.cancelled():  # by `close`, perhaps before it began
                receiver.got_fault("it has ended")

        task.add_done_callback(connected)

    async def _connect(self, request: bytes, receiver: Receiver, begun: Begun) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, link = await loop.create_connection(lambda: Link(self), "127.0.0.1", self.port)
        except TimeoutError:
            receiver.got_fault("it takes no connection")
            return
        except OSError as error:
            receiver.got_fault(f"it cannot be reached: {(error.strerror or str(error)).lower()}")
            return
        self._links.add(link)
        if begun(link):
            link.ask(request, receiver)
        else:
            link.transport.abort()

    def free(self, link: Link) -> None:
        """A connection can take the next request."""
        link.kept = True
        if len(self._free) < MOST_KEPT:
            self._free.append(link)
        else:
            link.transport.close()

    def lost(self, link: Link) -> None:
        """A connection has gone."""
        self._links.discard(link)
        if link in self._free:
            self._free.remove(link)

    def close(self) -> None:
        """Cut every connection; requests under way get a fault."""
        for task in list(self._tasks):
            task.cancel()
        for link in list(self._links):
            link.transport.abort()


class Begun(Protocol):
    """Told which connection a request has; False: the request has been given up meanwhile."""

    def __call__(self, link: Link) -> bool:
        """See the class."""
