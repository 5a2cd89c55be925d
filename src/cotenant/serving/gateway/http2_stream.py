"""One gRPC call on an HTTP/2 connection: messages in, answers in their order, a status at the end."""

from __future__ import annotations

import asyncio
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import quote

from google.protobuf.message import DecodeError

from cotenant.core.http2 import DATA, END_HEADERS, END_STREAM, FRAME_HEAD, HEADERS, RST_STREAM, frame, literal
from cotenant.serving.gateway.http1 import HttpLimits

PREFIX = struct.Struct(">BI")
INVALID, EXHAUSTED, UNIMPLEMENTED, INTERNAL = 3, 8, 12, 13


def header_frame(stream: int, block: bytes, ends: bool) -> bytes:
    """A HEADERS frame that contains the whole header block."""
    return frame(HEADERS, END_HEADERS | END_STREAM if ends else END_HEADERS, stream, block)


# :status 200 and content-type, by their indices in HPACK's static table
START = b"\x88" + b"\x0f\x10\x10application/grpc"
DONE = literal(b"grpc-status", b"0")


def trailers(status: int, message: str, extra: bytes = b"") -> bytes:
    """The encoded headers that end a call: its status and a message."""
    block = literal(b"grpc-status", b"%d" % status)
    if message:
        block += literal(b"grpc-message", quote(message, safe=" !#$&'()*+,/:;=?@[]~").encode()[:4000])
    return block + extra


class Front(Protocol):
    """Interface of the server that accepted a stream's connection, as far as the stream needs it."""

    @property
    def limits(self) -> HttpLimits:
        """Limits of the server on sizes and times."""

    @property
    def guard(self) -> Callable[[bytes], tuple[int, str] | None]:
        """A function that returns status and message for a caller without a valid token, and None for others."""

    @property
    def failed(self) -> Callable[[BaseException], None]:
        """Handles exceptions that the handler of a method did not catch."""


class Connection(Protocol):
    """Interface of a stream's connection, as far as the stream needs it. `window`: bytes that may be sent on all
    streams together.
    """

    window: int
    most_frame: int
    transport: asyncio.Transport

    @property
    def front(self) -> Front:
        """The server."""

    def forget(self, stream: Stream) -> None:
        """Forget a stream whose call has ended."""


def _nothing() -> None:
    """Does nothing."""


class Slot:
    """Place of one message's answer in the order of a stream's answers. `withdraw` is called if the client disconnects
    before the answer is complete.
    """

    __slots__ = ("data", "filled", "stream", "withdraw")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.data: bytes | None = None
        self.filled = False
        self.withdraw = _nothing

    def reply(self, message: bytes) -> None:
        """Send the answer to this message."""
        if not self.filled:
            self.data, self.filled = message, True
            self.stream.advance()

    def fail(self, status: int, message: str, retry_s: float | None = None) -> None:
        """End the whole call with a status instead of an answer to this message."""
        if not self.filled:
            self.filled = True
            self.stream.fail(status, message, retry_s)


class Handler:
    """A gRPC method. `serve(slot, message)` answers a message, now or later. `kind`: protobuf class of the message;
    None: `serve` gets its bytes. `streaming`: a call has several messages."""

    def __init__(
        self, serve: Callable[[Slot, Any], None], kind: Any = None, streaming: bool = False, guarded: bool = True
    ) -> None:
        self.serve, self.kind, self.streaming, self.guarded = serve, kind, streaming, guarded


class Stream:
    """One gRPC call. `window`: bytes that may be sent; `credit`: received bytes whose flow-control window was not yet
    returned to the client."""

    def __init__(self, connection: Connection, number: int, headers: dict[bytes, bytes], window: int) -> None:
        self.connection, self.number, self.headers, self.window = connection, number, headers, window
        self.credit = 0
        self.gone = self.complete = self.streaming = False
        self.began = time.monotonic()
        self._input = bytearray()
        self._handler: Handler | None = None
        self._slots: deque[Slot] = deque()
        self._started = False
        self._output = bytearray()
        self._ending: bytes | None = None

    def begin(self, handler: Handler | None) -> None:
        """Called when the headers have arrived."""
        if handler is None:
            self.fail(UNIMPLEMENTED, "there is no such method")
            return
        self._handler, self.streaming = handler, handler.streaming
        if handler.guarded:
            refused = self.connection.front.guard(self.headers.get(b"authorization", b""))
            if refused is not None:
                self.fail(*refused)

    def cancelled(self) -> None:
        """Called when the client has cancelled the call."""
        self.gone = True
        for slot in self._slots:
            if not slot.filled:
                slot.withdraw()

    def received(self, data: bytes, ended: bool) -> None:
        """Handle received bytes, which belong to messages of this call."""
        if self.gone or self.complete:
            return
        whole = self._input
        if not whole and ended and len(data) >= 5 and data[0] == 0 and len(data) - 5 == PREFIX.unpack_from(data)[1]:
            self.complete = True
            self._message(data[5:])
            if self.streaming:
                self.advance()
            return
        whole += data
        limit = self.connection.front.limits.body_bytes
        while len(whole) >= 5 and not self.gone:
            packed, size = PREFIX.unpack_from(whole)
            if size > limit:
                self.fail(EXHAUSTED, f"the message is over the limit of {limit} bytes")
                return
            if len(whole) - 5 < size:
                break
            message = bytes(whole[5 : 5 + size])
            del whole[: 5 + size]
            if packed:
                found = self._inflated(message, limit)
                if found is None:
                    return
                message = found
            self._message(message)
        if ended and not self.gone:
            self.complete = True
            if whole or not (self.streaming or self._slots or self._started):
                self.fail(INTERNAL, "the call ended inside a message")
                return
            self.advance()

    def _inflated(self, message: bytes, limit: int) -> bytes | None:
        encoding = self.headers.get(b"grpc-encoding", b"")
        if encoding not in (b"gzip", b"deflate"):
            self.fail(UNIMPLEMENTED, "messages must be compressed by gzip, deflate or not at all")
            return None
        inflater = zlib.decompressobj(wbits=47)
        try:
            out = inflater.decompress(message, limit + 1)
        except zlib.error:
            self.fail(INTERNAL, "a message does not match its encoding")
            return None
        if len(out) > limit:
            self.fail(EXHAUSTED, f"the message is over the limit of {limit} bytes")
            return None
        return out

    def _message(self, message: bytes) -> None:
        assert self._handler is not None
        if not self.streaming and self._slots:
            self.fail(INTERNAL, "a unary call must have one message")
            return
        slot = Slot(self)
        self._slots.append(slot)
        try:
            kind = self._handler.kind
            self._handler.serve(slot, message if kind is None else kind.FromString(message))
        except DecodeError:
            slot.fail(INVALID, "not a message of this method")
        except Exception as error:
            self.connection.front.failed(error)
            slot.fail(INTERNAL, "the server failed on this request")

    # ---- out ----

    def advance(self) -> None:
        """Send the answers that are next in order, and the status after the last."""
        if self.gone:
            return
        slots = self._slots
        if not self.streaming:
            slot = slots[0]
            if slot.filled and slot.data is not None:
                self._whole(slot.data)
            return
        while slots and slots[0].filled:
            data = slots.popleft().data
            assert data is not None
            self._start()
            self._output += PREFIX.pack(0, len(data)) + data
        if self.complete and not slots and self._ending is None:
            self._start()
            self._ending = DONE
        self.flush()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self.connection.transport.write(header_frame(self.number, START, False))

    def _whole(self, data: bytes) -> None:
        """Send the answer of a unary call: in one write if the flow-control windows allow it."""
        connection = self.connection
        size = len(data) + 5
        if size <= connection.most_frame and size <= self.window and size <= connection.window and not self._started:
            connection.window -= size
            number = self.number
            self.gone = True
            connection.transport.write(
                b"".join((
                    header_frame(number, START, False), FRAME_HEAD.pack(size >> 8, size & 0xFF, DATA, 0, number),
                    PREFIX.pack(0, size - 5), data, header_frame(number, DONE, True),
                ))
            )  # fmt: skip
            connection.forget(self)
            return
        self._start()
        self._output += PREFIX.pack(0, len(data)) + data
        self._ending = DONE
        self.flush()

    def flush(self) -> None:
        """Send as much as the flow-control windows allow."""
        connection = self.connection
        output = self._output
        while output and not self.gone:
            size = min(len(output), connection.most_frame, self.window, connection.window)
            if size <= 0:
                return
            self.window -= size
            connection.window -= size
            head = FRAME_HEAD.pack(size >> 8, size & 0xFF, DATA, 0, self.number)
            connection.transport.write(head + bytes(output[:size]))
            del output[:size]
        if self._ending is not None and not self.gone:
            self.gone = True
            connection.transport.write(header_frame(self.number, self._ending, True))
            connection.forget(self)

    def fail(self, status: int, message: str, retry_s: float | None = None) -> None:
        """End the call with a status."""
        if self.gone:
            return
        self.gone = True
        extra = b"" if retry_s is None else literal(b"retry-after", b"%d" % max(1, round(retry_s)))
        block = trailers(status, message, extra)
        if not self._started:
            block = START + block
        transport = self.connection.transport
        transport.write(header_frame(self.number, block, True))
        if not self.complete:  # asks the client not to send the rest of the request
            transport.write(frame(RST_STREAM, 0, self.number, struct.pack(">I", 0)))
        self.connection.forget(self)
