"""The small HTTP server against real sockets: what it answers, what it refuses, what it survives."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
from waiting import WITHIN_S, wait_for

from cotenant.core.errors import InputError, WorkError
from cotenant.observability.feed import Feed, Row
from cotenant.observability.http import MOST_VIEWERS, LiveServer, parse_address

TOKEN = "correct+horse/battery=="


@contextmanager
def serving(token: str | None = None) -> Iterator[LiveServer]:
    """A server in a thread of its own."""
    started = threading.Event()
    loop = asyncio.new_event_loop()

    async def rows() -> AsyncIterator[Row]:
        yield "jobs", "a", {"name": "<script>"}

    async def metrics() -> str:
        return "cotenant_up 1\n"

    server = LiveServer("127.0.0.1", 0, Feed(rows, period_s=0.01), metrics, token)

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(server.start())
        started.set()
        loop.run_forever()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(WITHIN_S)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(WITHIN_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WITHIN_S)
        loop.close()


def get(server: LiveServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(method, path, headers={key.replace("_", "-"): value for key, value in headers.items()})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, answer.headers["Content-Type"], body


def test_what_is_served() -> None:
    with serving() as server:
        status, kind, body = get(server, "/")
        assert (status, kind) == (200, "text/html; charset=utf-8")
        assert body.startswith("<!doctype html>")
        assert "/*JS*/" not in body
        # the page must work without a network, so it names no other address
        assert "http://" not in body.replace("http://www.w3.org/2000/svg", "")
        assert get(server, "/metrics") == (200, "text/plain; version=0.0.4; charset=utf-8", "cotenant_up 1\n")
        assert json.loads(get(server, "/state.json")[2])["jobs"] == [{"key": "a", "name": "<script>"}]
        assert get(server, "/healthz")[0] == 200
        assert get(server, "/metrics", method="HEAD")[2] == ""
        assert get(server, "/nothing")[0] == 404
        assert get(server, "/", method="POST")[0] == 405


def test_another_sites_name_for_this_address_is_refused() -> None:
    with serving() as server:
        assert get(server, "/state.json", Host="evil.example")[0] == 403
        assert get(server, "/state.json", Host=f"localhost:{server.port}")[0] == 200


def test_token() -> None:
    with serving(TOKEN) as server:
        assert get(server, "/metrics")[0] == 401
        assert get(server, "/metrics", Authorization="Bearer wrong")[0] == 401
        assert get(server, "/metrics", Authorization=f"Bearer {TOKEN}")[0] == 200
        assert get(server, f"/state.json?token={TOKEN}")[0] == 200
        assert get(server, f"/state.json?token={TOKEN.replace('+', '%2B')}")[0] == 200
        assert get(server, "/healthz")[0] == 200


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\r\n\r\n", b"400"),
        (b"GET\r\n\r\n", b"400"),
        (b"GET //[::1 HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: [::\r\n\r\n", b"400"),
        (b"\xff\xfe\x00 / HTTP/1.1\r\n\r\n", b"405"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 20000 + b"\r\n\r\n", b"431"),
    ],
)
def test_garbage_gets_an_answer_and_the_server_lives(sent: bytes, status: bytes) -> None:
    with serving() as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(sent)
            assert connection.recv(64).startswith(b"HTTP/1.1 " + status)
        assert get(server, "/healthz")[0] == 200


def test_idle_connections_keep_nobody_out() -> None:
    with serving() as server:
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
        assert get(server, "/healthz")[0] == 200
        more = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(80)]
        assert get(server, "/healthz")[0] == 503
        for connection in idle + more:
            connection.close()
        wait_for(lambda: get(server, "/healthz")[0] == 200)


@pytest.mark.parametrize("text", ["9400", "localhost", "a:b", "h:70000", "", "http://h:80", "a b:80", "[::1:80"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(InputError, match="not an address"):
        parse_address(text, "--http")


@pytest.mark.parametrize("text", ["::1", "::1:9400", "fe80::1:80"])
def test_an_ipv6_address_without_brackets_has_no_port_that_is_sure(text: str) -> None:
    with pytest.raises(InputError, match=r"in brackets, as in \[::1\]:9400"):
        parse_address(text, "--http")


def test_addresses() -> None:
    assert parse_address("gpu-node_1.example:80", "") == ("gpu-node_1.example", 80)
    assert parse_address(":9400", "") == ("127.0.0.1", 9400)
    assert parse_address("[::1]:80", "") == ("::1", 80)


def test_a_viewer_that_leaves_makes_room_at_once() -> None:
    """All places taken, and nothing changes that would show who is gone: the next one is served all the same."""
    with serving() as server:
        viewers = [socket.create_connection(("127.0.0.1", server.port), WITHIN_S) for _ in range(MOST_VIEWERS)]
        for viewer in viewers:
            viewer.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert viewer.recv(12) == b"HTTP/1.1 200"
        for viewer in viewers:
            viewer.close()

        def served() -> bool:
            with socket.create_connection(("127.0.0.1", server.port), WITHIN_S) as late:
                late.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
                return late.recv(12) == b"HTTP/1.1 200"

        wait_for(served)


def test_a_port_that_is_taken_is_one_sentence() -> None:
    async def second(port: int) -> None:
        async def metrics() -> str:
            return ""

        async def rows() -> AsyncIterator[Row]:
            yield "jobs", "a", {}

        await LiveServer("127.0.0.1", port, Feed(rows), metrics).start()

    with serving() as server, pytest.raises(WorkError) as caught:
        asyncio.run(second(server.port))
    assert str(caught.value) == f"cannot listen on 127.0.0.1:{server.port}: address already in use"
