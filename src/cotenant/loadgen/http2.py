"""The client side of HTTP/2, as far as gRPC needs it: takes received bytes, returns ended streams. It owns no socket.

RFC 9113. The client forbids the server a header table (SETTINGS_HEADER_TABLE_SIZE 0), so equal header blocks have equal
meanings, and a block that was decoded before need not be decoded again.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field

from cotenant.core.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FIRST_WINDOW,
    GOAWAY,
    HEADERS,
    MOST_WINDOW,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    frame,
    unpadded,
)  # fmt: skip

FRAME = 16_384  # largest size of a frame in bytes, until the server allows more
REFILL = 1 << 24  # after this many received bytes, the connection's flow-control window is opened again
MOST_KEPT, MOST_RECEIVED = 4096, 1 << 30

Headers = dict[bytes, bytes]


@dataclass
class Stream:
    """One HTTP/2 stream, a request that is not answered yet. `headers`: all received headers, including trailers."""

    number: int
    window: int
    unsent: bytes = b""
    headers: Headers = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)
    error: str = ""


class Http2Client:
    """State of one HTTP/2 connection. `out`: the bytes that the socket should send. Raises ValueError if the peer does
    not speak HTTP/2.
    """

    def __init__(self) -> None:
        from hpack import Decoder

        self._decoder = Decoder()
        self._decoder.header_table_size = self._decoder.max_allowed_table_size = 0
        self._kept: dict[bytes, Headers] = {}
        settings = struct.pack(">HIHIHI", 1, 0, 2, 0, 4, MOST_WINDOW)
        self.out = bytearray(PREFACE + frame(SETTINGS, 0, 0, settings))
        self.out += frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", MOST_WINDOW - FIRST_WINDOW))
        self.streams: dict[int, Stream] = {}
        self.most_streams = 100  # largest number of concurrent streams, until the server sets another limit
        self.going_away = False
        self._buffer = bytearray()
        self._next = 1
        self._window, self._stream_window, self._frame = FIRST_WINDOW, FIRST_WINDOW, FRAME
        self._received = 0
        self._blocked: deque[int] = deque()  # streams whose data wait until a flow-control window opens
        # stream, flags and first part of a block of headers whose rest is in the next frame
        self._block: tuple[int, int, bytearray] | None = None

    def request(self, block: bytes, body: bytes) -> int:
        """Start a stream for a request and return its number. The request's body is sent as far as flow control allows.
        """
        number, self._next = self._next, self._next + 2
        self.out += frame(HEADERS, END_HEADERS, number, block)
        stream = self.streams[number] = Stream(number, self._stream_window, body)
        if not self._push(stream):
            self._blocked.append(number)
        return number

    def cancel(self, number: int) -> None:
        """Cancel a stream, so that the server need not answer its request."""
        if self.streams.pop(number, None) is not None:
            self.out += frame(RST_STREAM, 0, number, struct.pack(">I", 8))

    def _push(self, stream: Stream) -> bool:
        """Send as much of the stream's body as flow control allows; returns whether that was all."""
        while True:
            size = min(len(stream.unsent), self._window, stream.window, self._frame)
            if size <= 0 and stream.unsent:
                return False
            last = size == len(stream.unsent)
            self.out += frame(DATA, END_STREAM if last else 0, stream.number, stream.unsent[:size])
            stream.unsent = stream.unsent[size:]
            self._window -= size
            stream.window -= size
            if last:
                return True

    def _unblock(self) -> None:
        for _ in range(len(self._blocked)):
            number = self._blocked.popleft()
            stream = self.streams.get(number)
            if stream is not None and not self._push(stream):
                self._blocked.append(number)

    def feed(self, data: bytes) -> list[Stream]:
        """Process bytes that the connection received; return the streams that have ended."""
        buffer = self._buffer
        buffer += data
        ended: list[Stream] = []
        at = 0
        while len(buffer) - at >= 9:
            size = int.from_bytes(buffer[at : at + 3], "big")
            if size > 1 << 20:
                raise ValueError("not HTTP/2")
            if len(buffer) - at < 9 + size:
                break
            kind, flags = buffer[at + 3], buffer[at + 4]
            number = int.from_bytes(buffer[at + 5 : at + 9], "big") & MOST_WINDOW
            self._frame_in(kind, flags, number, bytes(buffer[at + 9 : at + 9 + size]), ended)
            at += 9 + size
        del buffer[:at]
        return ended

    def _frame_in(self, kind: int, flags: int, number: int, body: bytes, ended: list[Stream]) -> None:
        if kind == DATA:
            self._data(flags, number, body, ended)
        elif kind == HEADERS:
            body = unpadded(flags, body)
            block = bytearray(body[5:] if flags & WITH_PRIORITY else body)
            self._headers(number, flags, block, bool(flags & END_HEADERS), ended)
        elif kind == CONTINUATION and self._block is not None:
            first, begun, block = self._block
            block += body
            self._headers(first, begun, block, bool(flags & END_HEADERS), ended)
        elif kind == RST_STREAM:
            stream = self.streams.pop(number, None)
            if stream is not None:
                stream.error = f"stream reset (error {int.from_bytes(body, 'big')})"
                ended.append(stream)
        elif kind == SETTINGS and not flags & ACK:
            self._settings(body)
        elif kind == PING and not flags & ACK:
            self.out += frame(PING, ACK, 0, body)
        elif kind == GOAWAY:
            self._goodbye(int.from_bytes(body[:4], "big") & MOST_WINDOW, ended)
        elif kind == WINDOW_UPDATE:
            more = int.from_bytes(body, "big") & MOST_WINDOW
            if number == 0:
                self._window += more
            elif number in self.streams:
                self.streams[number].window += more
            self._unblock()

    def _goodbye(self, last: int, ended: list[Stream]) -> None:
        self.going_away = True
        for number in [n for n in self.streams if n > last]:
            stream = self.streams.pop(number)
            stream.error = "the server is closing the connection (GOAWAY)"
            ended.append(stream)

    def _settings(self, body: bytes) -> None:
        for at in range(0, len(body) - 5, 6):
            name, value = struct.unpack_from(">HI", body, at)
            if name == 3:
                self.most_streams = value
            elif name == 4:
                for stream in self.streams.values():
                    stream.window += value - self._stream_window
                self._stream_window = value
            elif name == 5:
                self._frame = value
        self.out += frame(SETTINGS, ACK, 0)
        self._unblock()

    def _data(self, flags: int, number: int, body: bytes, ended: list[Stream]) -> None:
        self._received += len(body)
        if self._received >= REFILL:
            self.out += frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self._received))
            self._received = 0
        stream = self.streams.get(number)
        if stream is None:
            return
        stream.data += unpadded(flags, body)
        if len(stream.data) > MOST_RECEIVED:
            raise ValueError("an answer of more than 1 GiB")
        if flags & END_STREAM:
            ended.append(self.streams.pop(number))

    def _headers(self, number: int, flags: int, block: bytearray, whole: bool, ended: list[Stream]) -> None:
        if not whole:
            self._block = (number, flags, block)
            return
        self._block = None
        found = self._decode(bytes(block))
        stream = self.streams.get(number)
        if stream is None:
            return
        stream.headers.update(found)
        if flags & END_STREAM:
            ended.append(self.streams.pop(number))

    def _decode(self, block: bytes) -> Headers:
        found = self._kept.get(block)
        if found is None:
            from hpack import HPACKError

            try:
                found = {bytes(name): bytes(value) for name, value in self._decoder.decode(block, raw=True)}
            except HPACKError as error:
                raise ValueError(f"headers cannot be decoded: {error}") from None
            if len(self._kept) < MOST_KEPT:
                self._kept[block] = found
        return found
