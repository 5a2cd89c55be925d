"""The gRPC client of the gateway benchmark: prepared frames on raw sockets, one call at a time per connection.
`python -m cotenant.bench.gateway_grpc HOST PORT REQUEST_FILE CONNECTIONS SECONDS`; REQUEST_FILE holds the message."""

from __future__ import annotations

import struct
import time

from cotenant.bench.gateway_client import Client, main
from cotenant.core.http2 import DATA, FIRST_WINDOW, FRAME_HEAD, HEADERS, PREFACE, SETTINGS, WINDOW_UPDATE, frame

PATH = b"/inference.GRPCInferenceService/ModelInfer"
WINDOW = 1 << 30


def headers() -> bytes:
    """Return the HTTP/2 header block of a gRPC call: :method POST and :scheme http from the static table, the rest as
    literals.
    """

    def literal(index: int, value: bytes) -> bytes:
        name = bytes([index]) if index < 15 else bytes([15, index - 15])
        return name + bytes([len(value)]) + value

    te = b"\x00\x02te\x08trailers"
    return b"\x83\x86" + literal(4, PATH) + literal(1, b"bench") + literal(31, b"application/grpc") + te


class GrpcClient(Client):
    """A connection that makes the same gRPC call again and again."""

    def __init__(self, host: str, port: int, message: bytes) -> None:
        super().__init__(host, port, message)
        window = struct.pack(">HI", 4, WINDOW)
        grow = frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", WINDOW - FIRST_WINDOW))
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, window) + grow)
        self.block = headers()
        self.data = struct.pack(">BI", 0, len(message)) + message
        self.stream = -1

    def ask(self) -> None:
        self.stream += 2
        self.sent = time.perf_counter()
        self.socket.sendall(frame(HEADERS, 0x4, self.stream, self.block) + frame(DATA, 0x1, self.stream, self.data))

    def read(self) -> bool | None:
        self.receive()
        answer: bool | None = None
        while len(self.buffer) >= 9:
            high, low, kind, flags, stream = FRAME_HEAD.unpack_from(self.buffer)
            size = (high << 8) | low
            if len(self.buffer) < 9 + size:
                break
            payload, self.buffer = self.buffer[9 : 9 + size], self.buffer[9 + size :]
            if kind == SETTINGS and not flags & 1:
                self.socket.sendall(frame(SETTINGS, 1, 0, b""))
            elif kind == HEADERS and flags & 1 and stream == self.stream:
                answer = b"grpc-status\x010" in payload
        return answer


if __name__ == "__main__":
    main(GrpcClient)
