"""Requests to one program over persistent HTTP/1.1 connections: answers are forwarded as they arrive.

This module uses callbacks and a parser in C, as gateway/http1.py does for connections of clients. Decision 0138
compares it with an ordinary client library.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

import httptools

MOST_KEPT = 256
CONNECT_S = 10.0


class Receiver(Protocol):
    """Receives the answer to one request. `got_end` or `got_fault` is called last, once."""

    def got_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Called with the status and the headers, whose names are in lower case."""

    def got_body(self, data: bytes) -> None:
        """Called with each piece of the body, as received."""

    def got_end(self) -> None:
        """Called when the answer is complete."""

    def got_fault(self, why: str) -> None:
        """Called if the answer is missing or incomplete."""


class Link(asyncio.Protocol):
    """One connection to the program, with one request at a time."""

    __slots__ = ("_again", "_chunks", "_headers", "_parser", "_receiver", "_sized", "_upstream", "kept", "transport")

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._receiver: Receiver | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._chunks: list[bytes] = []
        self._sized = False
        self._again = False  # the answer is complete, and the connection may be used for another request
        # true: the connection was idle before the current request, so the program may be closing it now
        self.kept = False

    def ask(self, request: bytes, receiver: Receiver) -> None:
        """Send a request on this connection."""
        self._receiver = receiver
        self._parser = httptools.HttpResponseParser(self)
        self.transport.write(request)

    def abandon(self) -> None:
        """Close the connection to the program, because the answer is no longer wanted."""
        self._receiver = None
        self.transport.abort()

    def slow(self, full: bool) -> None:
        """Pause reading from the program (True), or resume (False)."""
        if not self.transport.is_closing():
            self.transport.pause_reading() if full else self.transport.resume_reading()

    # ---- asyncio ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes. Everything received in one read is forwarded as one piece."""
        if self._receiver is None:  # no request is waiting for these data, or they come after the end of an answer
            self.transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fault("the program's answer is not HTTP/1.1")
            self.transport.abort()
            return
        self._hand_on()
        if self._again and not self.transport.is_closing():
            self._again = False
            self.transport.resume_reading()
            self._upstream.free(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._upstream.lost(self)
        if self._receiver is not None and self._headers and not self._sized:
            self._hand_on()
            self._end()  # an answer without a length ends when the connection closes
        self._fault("the program closed the connection" if exc is None else f"the connection broke: {exc}")

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
        if self._receiver is None:  # a second answer to one request: the next request could get it as its own
            self._again = False
            self.transport.abort()
        self._headers, self._sized = [], False
        self._chunks.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._headers.append((name, value))
        if name in (b"content-length", b"transfer-encoding"):
            self._sized = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._headers = []  # an informational status such as 100 Continue, after which the real answer comes
        elif self._receiver is not None:
            self._receiver.got_head(status, self._headers)

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200 or self._receiver is None:
            return
        self._hand_on()
        self._again = self._parser.should_keep_alive() and self._sized
        self._headers = []
        self._end()
        if not self._again:
            self.transport.close()


class Upstream:
    """All connections to one program. Used by one event loop."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.host = f"127.0.0.1:{port}".encode()
        self._free: list[Link] = []
        self._links: set[Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, request: bytes, receiver: Receiver, begun: Begun, *, fresh: bool = False) -> None:
        """Send a complete request; `fresh`: on a new connection. `begun` gets the connection, now or later, unless
        there is a fault first.
        """
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
            if task.cancelled():  # `close` has cancelled the task, possibly before the task started
                receiver.got_fault("the program has ended")

        task.add_done_callback(connected)

    async def _connect(self, request: bytes, receiver: Receiver, begun: Begun) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, link = await loop.create_connection(lambda: Link(self), "127.0.0.1", self.port)
        except TimeoutError:
            receiver.got_fault("the program accepts no connection")
            return
        except OSError as error:
            receiver.got_fault(f"the program cannot be reached: {(error.strerror or str(error)).lower()}")
            return
        self._links.add(link)
        if begun(link):
            link.ask(request, receiver)
        else:
            link.transport.abort()

    def free(self, link: Link) -> None:
        """Keep a connection whose request is finished, for a later request. Close it if MOST_KEPT are already kept."""
        link.kept = True
        if len(self._free) < MOST_KEPT:
            self._free.append(link)
        else:
            link.transport.close()

    def lost(self, link: Link) -> None:
        """Forget a closed connection."""
        self._links.discard(link)
        if link in self._free:
            self._free.remove(link)

    def close(self) -> None:
        """Close every connection to the program; running requests get a fault."""
        for task in list(self._tasks):
            task.cancel()
        for link in list(self._links):
            link.transport.abort()


class Begun(Protocol):
    """Function that is called with the connection on which a request is to be sent. Returns False if the request was
    cancelled meanwhile."""

    def __call__(self, link: Link) -> bool:
        """Use the connection for the request. Returns False if the request was cancelled meanwhile."""
