"""The closed-loop HTTP client of the gateway benchmark: each connection sends its next request when it has a response.
It uses raw sockets and a prepared request, to take little CPU from the server. `python -m
cotenant.bench.gateway_client HOST PORT REQUEST_FILE CONNECTIONS SECONDS` prints one JSON object."""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

WARM_S = 1.0


class Client:
    """A connection that sends the same HTTP request again and again. `sent`: time of the last request in s."""

    def __init__(self, host: str, port: int, request: bytes) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.request, self.buffer, self.sent = request, b"", 0.0

    def ask(self) -> None:
        """Send the request."""
        self.buffer, self.sent = b"", time.perf_counter()
        self.socket.send(self.request)

    def receive(self) -> None:
        """Read the bytes that have arrived. Raises ConnectionError if the server has closed the connection."""
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionError("the server closed a connection")
        self.buffer += data

    def read(self) -> bool | None:
        """Read the bytes that the connection has received. Returns whether the request has succeeded, or None if it is
        still in flight.
        """
        self.receive()
        return self.buffer.startswith(b"HTTP/1.1 200") if whole(self.buffer) else None


def drive(connect: Callable[[], Client], connections: int, seconds: float) -> dict[str, float]:
    """Send requests in a closed loop. Returns requests per second and percentiles of latency over `seconds`, after a
    warm-up.
    """
    poll = select.epoll()
    clients = {}
    for _ in range(connections):
        one = connect()
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


def summary(latencies: list[float], failed: int, seconds: float) -> dict[str, float]:
    """Return the figures of a run of the client: number of requests, failures, requests per second, and percentiles of
    latency in ms. `latencies` are in seconds and get sorted. ConnectionError if there are none.
    """
    if not latencies:
        raise ConnectionError("no request was answered")
    latencies.sort()
    count = len(latencies)
    return {
        "requests": count,
        "failed": failed,
        "rps": count / seconds,
        "p50_ms": latencies[count // 2] * 1e3,
        "p99_ms": latencies[min(count - 1, int(count * 0.99))] * 1e3,
    }


def whole(data: bytes) -> bool:
    """Whether `data` is a complete HTTP response, with a content length or chunked."""
    head, gap, body = data.partition(b"\r\n\r\n")
    if not gap:
        return False
    at = head.lower().find(b"content-length:")
    if at < 0:
        return body.endswith(b"0\r\n\r\n")
    return len(body) >= int(head[at + 15 :].split(b"\r\n", 1)[0])


def main(client: Callable[[str, int, bytes], Client] = Client) -> None:
    """Run the client with the arguments of the command line."""
    host, port, request, connections, seconds = sys.argv[1:6]
    content = Path(request).read_bytes()
    print(json.dumps(drive(lambda: client(host, int(port), content), int(connections), float(seconds))))


if __name__ == "__main__":
    main()
