"""Clients that go before their answer: what has not been batched leaves the queue, by every door."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from http2_peer import Peer, message
from serve_setup import deployment, infer, plan, tensor
from server_thread import Running, running
from waiting import wait_for

from cotenant.bench.gateway_grpc import DATA, HEADERS, frame, headers
from cotenant.serving.dispatch.calls import Outcome

RST_STREAM, GOAWAY, CALM = 3, 7, 11
X = np.zeros((1, 2), np.float32)
CANCEL = struct.pack(">I", 8)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    graph = {"name": "app", "graph": {"b": []}, "rate_rps": 5, "slo_ms": 20_000}
    services = deployment(
        [{"name": "a", "slo_ms": 20_000}], tmp_path_factory.mktemp("gone"), applications=[graph]
    )  # fmt: skip
    lets = plan({"a": 8}, {"app:b": 4})
    with running(services, plan=lets, grpc="127.0.0.1:0") as found:
        yield found


def waiting(server: Running, name: str = "a") -> int:
    count: int = server.call(lambda: server.server.pool.waiting(name))
    return count


def cancelled(server: Running, name: str = "a") -> int:
    count: int = server.call(lambda: server.server.stats.services[name].outcomes[Outcome.CANCELLED])
    return count


@pytest.fixture
def held(server: Running) -> Iterator[None]:
    """No gpulet takes a batch."""
    pool = server.server.pool
    server.call(lambda: [pool.desk.hold(i) for i in range(2)])
    yield
    server.call(lambda: [pool._carry_out(pool.desk.done(i, pool.now_ms()), pool.now_ms()) for i in range(2)])
    assert infer(server.http_url, "a")[0] == 200
    assert server.status()["in_flight"] == 0


def post(server: Running, name: str = "a") -> socket.socket:
    host, port = server.http_url.removeprefix("http://").rsplit(":", 1)
    peer = socket.create_connection((host, int(port)))
    peer.settimeout(60)
    body = json.dumps({"inputs": [tensor([1.0, 2.0])]}).encode()
    head = f"POST /v2/models/{name}/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    peer.sendall(head.encode() + body)
    return peer


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("name", ["a", "app"])
def test_a_client_of_http_that_goes_leaves_the_queue(server: Running, name: str) -> None:
    queue, before = {"a": "a", "app": "app:b"}[name], cancelled(server, name)
    stays = post(server)
    peer = post(server, name)
    wait_for(lambda: waiting(server, queue) == (2 if name == "a" else 1))
    peer.close()
    wait_for(lambda: waiting(server, queue) == (1 if name == "a" else 0))
    assert cancelled(server, name) == before + 1
    stays.shutdown(socket.SHUT_WR)  # only the sending side is closed, so the client still gets the answer
    answer = stays.recv(65536)
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"the client has disconnected" in answer
    assert waiting(server) == 0


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("how", ["reset", "disconnect"])
def test_a_call_that_is_taken_back_leaves_the_queue(server: Running, how: str) -> None:
    before = cancelled(server)
    peer = Peer(server)
    for stream in (1, 3, 5):
        peer.send(frame(HEADERS, 0x4, stream, headers()), frame(DATA, 0x1, stream, message(X)))
    wait_for(lambda: waiting(server) == 3)
    if how == "reset":
        peer.send(frame(RST_STREAM, 0, 3, CANCEL))
        wait_for(lambda: waiting(server) == 2)
    peer.socket.close()
    wait_for(lambda: waiting(server) == 0)
    assert cancelled(server) == before + 3


def taken_back(first: int, count: int) -> bytes:
    calls: list[Any] = []
    for stream in range(first, first + 2 * count, 2):
        calls += [frame(HEADERS, 0x4, stream, headers()), frame(DATA, 0x1, stream, message(X)),
                  frame(RST_STREAM, 0, stream, CANCEL)]  # fmt: skip
    return b"".join(calls)


def test_eleven_thousand_calls_taken_back_delay_no_other_client(server: Running) -> None:
    before, pool = cancelled(server), server.server.pool
    peers = [Peer(server) for _ in range(8)]
    # no batch takes a call before it is taken back, however slow this machine is
    server.call(lambda: pool.desk.hold(0))
    for k in range(14):
        for peer in peers:
            peer.send(taken_back(1 + 200 * k, 100))
    assert infer(server.http_url, "app")[0] == 200
    wait_for(lambda: cancelled(server) == before + 11_200)
    assert waiting(server) == 0
    assert server.call(lambda: server.server.stats.services["a"].outcomes[Outcome.FULL]) == 0
    server.call(lambda: pool._carry_out(pool.desk.done(0, pool.now_ms()), pool.now_ms()))
    assert infer(server.http_url, "a")[0] == 200
    for peer in peers:
        peer.socket.close()


def test_a_connection_that_takes_calls_back_without_end_is_closed(server: Running) -> None:
    peer = Peer(server)
    try:
        for k in range(300):
            peer.send(taken_back(1 + 200 * k, 100))
        # a busy server may not have read the first call yet; it must close the connection all the same
        while peer.read() is not None:
            pass
    except (BrokenPipeError, ConnectionResetError):
        pass
    assert infer(server.http_url, "a")[0] == 200


def test_the_reason_is_sent(server: Running) -> None:
    peer = Peer(server)
    peer.send(taken_back(1, 2500))
    payload = peer.until(GOAWAY)[3]
    assert int.from_bytes(payload[4:8], "big") == CALM
    assert b"too many cancelled calls" in payload
