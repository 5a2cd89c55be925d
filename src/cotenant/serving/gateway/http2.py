"""HTTP/2 for gRPC on an event loop: unary calls and bidirectional streams, nothing else of HTTP/2.

Decision 0081 says why it is not grpcio's server. Answers that fit the windows are sent in one write; repeated header
blocks are decoded once. Frames follow RFC 9113, and headers, which the hpack package decodes, RFC 7541.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from hpack import Decoder
from hpack.exceptions import HPACKError
from hpack.table import HeaderTable

from cotenant.core.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FIRST_WINDOW,
    FRAME_HEAD,
    GOAWAY,
    HEADERS,
    MOST_WINDOW,
    PADDED,
    PING,
    PREFACE,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    ProtocolError,
    frame,
    unpadded,
)  # fmt: skip
from cotenant.serving.gateway.http1 import MOST_HEADER_BYTES, MOST_HEADERS, HttpLimits
from cotenant.serving.gateway.http2_stream import Handler, Stream, header_frame

NO_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR = 0, 3, 6
REFUSED_STREAM, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 7, 9, 11
STREAMS, WINDOW, MOST_FRAME = 1024, 4 << 20, 1 << 20
# number of decoded header blocks that each connection caches, and size in bytes above which a block is not cached
KNOWN_BLOCKS, KNOWN_BYTES = 64, 1024
MOST_CONTROL = 10_000  # largest number of control frames that may come between two frames with a request or data
MOST_RESETS = 2 * STREAMS  # largest excess of cancelled calls over answered ones; above it the connection is closed


class _Table(HeaderTable):
    """A header table of HPACK that counts its changes, so that decoded header blocks can be cached between changes."""

    changes = 0

    def add(self, *entry: Any) -> None:
        """See hpack."""
        self.changes += 1
        super().add(*entry)


class Connection(asyncio.Protocol):
    """One client's HTTP/2 connection."""

    def __init__(self, front: Http2Front) -> None:
        self.front = front
        self.streams: dict[int, Stream] = {}
        self.window = 65535  # bytes that may be sent to the client on all streams together
        self.initial_window = 65535
        self.most_frame = 16384
        self.deadline = time.monotonic() + front.limits.read_s
        self.closing = False
        self._buffer = bytearray()
        self._greeted = False
        self._last = 0
        self._credit = 0  # bytes received for which the client's connection window has not been enlarged again
        self._block: tuple[int, int, bytearray] | None = None
        self._decoder = Decoder()
        self._table = self._decoder.header_table = _Table()
        self._decoder.max_header_list_size = MOST_HEADER_BYTES
        self._known: dict[bytes, dict[bytes, bytes]] = {}
        self._changes = 0
        self._control = self._resets = 0
        self._paused = False

    # ---- asyncio ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if len(self.front.connections) >= self.front.limits.connections:
            self.front.refused += 1
            self.closing = True
            self.transport.abort()
            return
        self.front.connections.add(self)
        settings = struct.pack(
            ">HIHIHIHI", 3, STREAMS, 4, WINDOW, 5, MOST_FRAME, 6, MOST_HEADER_BYTES
        )  # the settings limit streams, the window of each stream, and the sizes of frames and headers
        grow = struct.pack(">I", 4 * WINDOW - FIRST_WINDOW)
        self.transport.write(frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, grow))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = True
        gone = list(self.streams.values())
        self.streams.clear()
        for stream in gone:
            stream.cancelled()
        self.front.connections.discard(self)

    def pause_writing(self) -> None:
        self._paused = True
        self.deadline = time.monotonic() + self.front.limits.write_s
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self.closing:
            return
        buffer = self._buffer
        buffer += data
        try:
            self._frames(buffer)
        except ProtocolError as error:
            self.end(error.code, str(error))
        except (HPACKError, struct.error, IndexError) as error:
            self.end(COMPRESSION_ERROR, type(error).__name__)

    def _frames(self, buffer: bytearray) -> None:
        if not self._greeted:
            if len(buffer) < len(PREFACE):
                if not PREFACE.startswith(bytes(buffer)):
                    raise ProtocolError(PROTOCOL_ERROR, "not HTTP/2")
                return
            if not buffer.startswith(PREFACE):
                raise ProtocolError(PROTOCOL_ERROR, "not HTTP/2")
            del buffer[: len(PREFACE)]
            self._greeted = True
        at, end = 0, len(buffer)
        while end - at >= 9:
            high, low, kind, flags, stream = FRAME_HEAD.unpack_from(buffer, at)
            size = (high << 8) | low
            if size > MOST_FRAME:
                raise ProtocolError(FRAME_SIZE_ERROR, "a frame is too large")
            if end - at - 9 < size:
                break
            payload = bytes(buffer[at + 9 : at + 9 + size])
            at += 9 + size
            self._frame(kind, flags, stream & MOST_WINDOW, payload)
            if self.closing:
                return
        if at:
            del buffer[:at]
        self.deadline = time.monotonic() + (self.front.limits.idle_s if not self.streams else 1e9)

    # ---- frames ----

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block is not None and kind != CONTINUATION:
            raise ProtocolError(PROTOCOL_ERROR, "headers are interrupted by another frame")
        if kind == DATA:
            self._data(flags, number, payload)
        elif kind == HEADERS:
            payload = unpadded(flags, payload)
            if flags & WITH_PRIORITY:
                payload = payload[5:]
            self._header_block(flags, number, payload)
        elif kind == CONTINUATION:
            self._continued(flags, number, payload)
        elif kind == WINDOW_UPDATE:
            self._window_update(number, payload)
        elif kind == RST_STREAM:
            self._reset(self.streams.pop(number, None))
        elif kind == SETTINGS:
            self._settings(flags, payload)
        elif kind == PING:
            if len(payload) != 8:
                raise ProtocolError(FRAME_SIZE_ERROR, "a ping must have 8 bytes")
            self._controlled()
            if not flags & ACK:
                self.transport.write(frame(PING, ACK, 0, payload))
        elif kind == PUSH_PROMISE:
            raise ProtocolError(PROTOCOL_ERROR, "a client must not push")
        else:  # frames of priority and of unknown types need no action
            self._controlled()

    def _reset(self, stream: Stream | None) -> None:
        """Count a cancelled call. Close the connection if far more calls were cancelled than answered."""
        if stream is None:
            self._controlled()
            return
        stream.cancelled()
        self._resets += 1
        if self._resets > MOST_RESETS:
            raise ProtocolError(ENHANCE_YOUR_CALM, "too many cancelled calls")

    def _controlled(self) -> None:
        """Count frames that cause work but carry no request; close the connection if there are too many."""
        self._control += 1
        if self._control > MOST_CONTROL:
            raise ProtocolError(ENHANCE_YOUR_CALM, "too many control frames")

    def _header_block(self, flags: int, number: int, block: bytes) -> None:
        if not flags & END_HEADERS:
            self._block = (number, flags, bytearray(block))
            return
        self._headers(flags, number, block)

    def _continued(self, flags: int, number: int, payload: bytes) -> None:
        if self._block is None or self._block[0] != number:
            raise ProtocolError(PROTOCOL_ERROR, "a CONTINUATION frame without a HEADERS frame before it")
        self._controlled()
        _, first, block = self._block
        block += payload
        if len(block) > MOST_HEADER_BYTES:
            raise ProtocolError(ENHANCE_YOUR_CALM, "the headers are too large")
        if flags & END_HEADERS:
            self._block = None
            self._headers(first, number, bytes(block))

    def _headers(self, flags: int, number: int, block: bytes) -> None:
        known = self._known.get(block)
        if known is None:
            found = list(self._decoder.decode(block, raw=True))
            if len(found) > MOST_HEADERS:
                raise ProtocolError(ENHANCE_YOUR_CALM, f"a request may have at most {MOST_HEADERS} headers")
            known = {bytes(name): bytes(value) for name, value in found}
            if self._table.changes != self._changes:
                self._changes = self._table.changes
                self._known.clear()
            elif len(self._known) < KNOWN_BLOCKS and len(block) <= KNOWN_BYTES:
                self._known[block] = known
        if number in self.streams:  # the headers are trailers of a request, which the server does not need
            self._controlled()
            self.streams[number].received(b"", True)
            return
        if number % 2 == 0 or number <= self._last:
            raise ProtocolError(PROTOCOL_ERROR, "the number of a new stream is even or not above the last one")
        self._last = number
        self._control = 0
        if len(self.streams) >= STREAMS or self.front.draining:
            self.transport.write(frame(RST_STREAM, 0, number, struct.pack(">I", REFUSED_STREAM)))
            return
        stream = Stream(self, number, known, self.initial_window)
        self.streams[number] = stream
        handler = self.front.handlers.get(known.get(b":path", b""))
        if known.get(b":method") != b"POST" or not known.get(b"content-type", b"").startswith(b"application/grpc"):
            self.transport.write(header_frame(number, b"\x8d", True))  # 404: only gRPC is served here
            self.streams.pop(number).gone = True
            return
        stream.begin(handler)
        if flags & END_STREAM and not stream.gone:
            stream.received(b"", True)

    def _data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._credit += size
        if self._credit >= WINDOW:
            self.transport.write(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self._credit)))
            self._credit = 0
        stream = self.streams.get(number)
        if stream is None:
            if number > self._last:
                raise ProtocolError(PROTOCOL_ERROR, "data for an unknown stream")
            return
        ended = bool(flags & END_STREAM)
        if size:
            self._control = 0
        elif not ended:
            self._controlled()
        if not ended:
            stream.credit += size
            if stream.credit >= WINDOW // 2:
                self.transport.write(frame(WINDOW_UPDATE, 0, number, struct.pack(">I", stream.credit)))
                stream.credit = 0
        stream.received(unpadded(flags, payload) if flags & PADDED else payload, ended)

    def _window_update(self, number: int, payload: bytes) -> None:
        (more,) = struct.unpack(">I", payload)
        more &= MOST_WINDOW
        if more == 0:
            raise ProtocolError(PROTOCOL_ERROR, "the increment of a flow-control window is 0")
        if number == 0:
            self.window += more
            if self.window > MOST_WINDOW:
                raise ProtocolError(FLOW_CONTROL_ERROR, "a flow-control window would exceed 2^31 - 1 bytes")
            for stream in list(self.streams.values()):
                stream.flush()
            return
        waiting = self.streams.get(number)
        if waiting is not None:
            waiting.window += more
            if waiting.window > MOST_WINDOW:
                raise ProtocolError(FLOW_CONTROL_ERROR, "a flow-control window would exceed 2^31 - 1 bytes")
            waiting.flush()
        else:
            self._controlled()

    def _settings(self, flags: int, payload: bytes) -> None:
        self._controlled()
        if flags & ACK:
            return
        for key, value in struct.iter_unpack(">HI", payload):
            if key == 4:
                if value > MOST_WINDOW:
                    raise ProtocolError(FLOW_CONTROL_ERROR, "a flow-control window would exceed 2^31 - 1 bytes")
                for stream in self.streams.values():
                    stream.window += value - self.initial_window
                self.initial_window = value
            elif key == 5:
                self.most_frame = min(max(16384, value), 1 << 20)
        self.transport.write(frame(SETTINGS, ACK, 0))
        for stream in list(self.streams.values()):
            stream.flush()

    # ---- the end ----

    def forget(self, stream: Stream) -> None:
        """Forget a stream whose call has been answered."""
        self.streams.pop(stream.number, None)
        self._resets = max(0, self._resets - 1)
        if not self.streams:
            self.deadline = time.monotonic() + self.front.limits.idle_s
            if self.front.draining:
                self.end(NO_ERROR, "")

    def end(self, code: int, why: str) -> None:
        """Send the client a GOAWAY frame with the reason, and close the connection."""
        if self.closing:
            return
        self.closing = True
        self.transport.write(frame(GOAWAY, 0, 0, struct.pack(">II", self._last, code) + why.encode()[:200]))
        self.transport.close()

    def expire(self, now: float) -> None:
        """Close the connection if the client has not read or sent in time; called about once a second."""
        if self._paused and self.deadline < now:
            self.transport.abort()
        elif self.deadline < now and not self.streams:
            self.end(NO_ERROR, "idle")
        late = now - self.front.limits.read_s
        for stream in [x for x in self.streams.values() if not x.complete and not x.streaming and x.began < late]:
            stream.fail(4, "the request did not arrive in time")

    def drain(self) -> None:
        """Accept no new calls on this connection; close it when the running calls are answered."""
        if not self.streams:
            self.end(NO_ERROR, "the server is shutting down")
        elif not self.closing:
            self.transport.write(frame(GOAWAY, 0, 0, struct.pack(">II", self._last, NO_ERROR)))
            for stream in list(self.streams.values()):
                if stream.streaming:
                    stream.received(b"", True)


class Http2Front:
    """All gRPC connections of a server. `handlers` by path; `guard` returns the status for an unauthorised caller, None
    otherwise.
    """

    def __init__(
        self, handlers: Mapping[bytes, Handler], limits: HttpLimits, failed: Callable[[BaseException], None],
        guard: Callable[[bytes], tuple[int, str] | None],
    ) -> None:  # fmt: skip
        self.handlers, self.limits, self.failed, self.guard = handlers, limits, failed, guard
        self.connections: set[Connection] = set()
        self.refused = 0
        self.draining = False

    def protocol(self) -> Connection:
        """Create the object of a new connection; passed to loop.create_server."""
        return Connection(self)

    def sweep(self) -> None:
        """Close connections past their deadline. Called about once a second."""
        now = time.monotonic()
        for connection in list(self.connections):
            connection.expire(now)

    def drain(self) -> None:
        """See Connection.drain."""
        self.draining = True
        for connection in list(self.connections):
            connection.drain()

    def abort(self) -> None:
        """Close all connections at once."""
        for connection in list(self.connections):
            connection.transport.abort()
