"""The closed-loop HTTP client of the gateway benchmark: each connection sends its next request when it has a response.
It uses raw sockets and a prepared request, to take little CPU from the server. `python -m
cotenant.bench.gateway_client HOST PORT REQUEST_FILE CONNECTIONS SECONDS` prints one JSON object."""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from pathlib import Path

WARM_S = 1.0


def drive(host: str, port: int, request: bytes, connections: int, seconds: float) -> dict[str, float]:
    """Send requests in a closed loop. Returns requests per second and percentiles of latency over `seconds`, after a
    warm-up.
    """
    poll = select.epoll()
    sockets: dict[int, socket.socket] = {}
    sent: dict[int, float] = {}
    pending: dict[int, bytes] = {}
    for _ in range(connections):
        one = socket.create_connection((host, port))
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets[one.fileno()] = one
        poll.register(one, select.EPOLLIN)
    began = time.perf_counter()
    for fd, one in sockets.items():
        sent[fd] = time.perf_counter()
        one.send(request)
    counted_from, end = began + WARM_S, began + WARM_S + seconds
    latencies: list[float] = []
    failed = 0
    now = began
    while now < end:
        for fd, _ in poll.poll(1.0):
            data = sockets[fd].recv(65536)
            now = time.perf_counter()
            if not data:
                raise ConnectionError("the server closed a connection")
            data = pending.pop(fd, b"") + data
            if not whole(data):
                pending[fd] = data
                continue
            if now >= counted_from:
                latencies.append(now - sent[fd])
                failed += not data.startswith(b"HTTP/1.1 200")
            sent[fd] = now
            sockets[fd].send(request)
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


def main() -> None:
    """Run the HTTP client with the arguments of the command line."""
    host, port, request, connections, seconds = sys.argv[1:6]
    print(json.dumps(drive(host, int(port), Path(request).read_bytes(), int(connections), float(seconds))))


if __name__ == "__main__":
    main()
