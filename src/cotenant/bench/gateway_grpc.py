"""The gRPC client of the gateway benchmark: prepared frames on raw sockets, one call at a time per connection.
`python -m cotenant.bench.gateway_grpc HOST PORT REQUEST_FILE CONNECTIONS SECONDS`; REQUEST_FILE holds the message."""

from __future__ import annotations

import json
import select
import socket
import struct
import sys
import time
from pathlib import Path

from cotenant.bench.gateway_client import WARM_S, summary
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


class Client:
    """One gRPC connection with at most one call in flight."""

    def __init__(self, host: str, port: int, message: bytes) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        window = struct.pack(">HI", 4, WINDOW)
        grow = frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", WINDOW - FIRST_WINDOW))
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, window) + grow)
        self.block = headers()
        self.data = struct.pack(">BI", 0, len(message)) + message
        self.stream = -1
        self.sent = 0.0
        self.buffer = b""

    def ask(self) -> None:
        """Start the connection's next call."""
        self.stream += 2
        self.sent = time.perf_counter()
        self.socket.sendall(frame(HEADERS, 0x4, self.stream, self.block) + frame(DATA, 0x1, self.stream, self.data))

    def read(self) -> bool | None:
        """Read the bytes that the connection has received. Returns whether the call has succeeded, or None if it is
        still in flight.
        """
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionError("the server closed a connection")
        self.buffer += data
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


def drive(host: str, port: int, message: bytes, connections: int, seconds: float) -> dict[str, float]:
    """Send gRPC calls in a closed loop. Returns requests per second and percentiles of latency over `seconds`, after a
    warm-up, as `gateway_client.drive` does for HTTP.
    """
    poll = select.epoll()
    clients = {}
    for _ in range(connections):
        one = Client(host, port, message)
        clients[one.socket.fileno()] = one
        poll.register(one.socket, select.EPOLLIN)
        one.ask()
    began = now = time.perf_counter()
    counted_from, end = began + WARM_S, began + WARM_S + seconds
    latencies: list[float] = []
    failed = 0
    while now < end:
        for fd, _ in poll.poll(1.0):
            one = clients[fd]
            answer = one.read()
            now = time.perf_counter()
            if answer is None:
                continue
            if now >= counted_from:
                latencies.append(now - one.sent)
                failed += not answer
            one.ask()
        now = time.perf_counter()
    return summary(latencies, failed, seconds)


def main() -> None:
    """Run the gRPC client with the arguments of the command line."""
    host, port, message, connections, seconds = sys.argv[1:6]
    print(json.dumps(drive(host, int(port), Path(message).read_bytes(), int(connections), float(seconds))))


if __name__ == "__main__":
    main()
