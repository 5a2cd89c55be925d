"""Requests to language models that are not valid HTTP, or are over a limit: each gets a sentence in OpenAI's form."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models_door import PATIENCE_S, Door, chat, door, model

POST = b"POST /v1/chat/completions HTTP/1.1\r\n"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    listen = {"http": "127.0.0.1:0", "max_body": "1MiB"}
    with door(tmp_path_factory.mktemp("http"), model("a"), listen=listen) as it:
        yield it


def asked(it: Door, data: bytes, *, ends: bool = False) -> tuple[int, Any]:
    """Status and content of the answer to these bytes. `ends`: the client closes its sending side after them."""
    with socket.create_connection(("127.0.0.1", it.port), timeout=PATIENCE_S) as client:
        client.sendall(data)
        if ends:
            client.shutdown(socket.SHUT_WR)
        got = http.client.HTTPResponse(client)
        got.begin()
        content = json.loads(got.read())
        assert client.recv(1) == b""
        return got.status, content


def error(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


def test_a_body_over_the_limit_is_read_and_dropped_so_that_its_client_gets_the_answer(one: Door) -> None:
    """The client reads only after it has sent everything, 64 MiB."""
    told = error(413, "the body is over the limit of 1048576 bytes")
    size = 64 << 20
    assert asked(one, POST + b"content-length: %d\r\n\r\n" % size + bytes(size)) == told
    assert asked(one, POST + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % size + bytes(size)) == told
    assert one.ask(chat("a"))[0] == 200


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"no HTTP at all\r\n\r\n", error(400, "not HTTP/1.1")),
        (POST + b"content-length: -1\r\n\r\n", error(400, "not HTTP/1.1")),
        (POST + b"x: %s\r\n\r\n" % (b"v" * 40_000), error(431, "the headers are too large")),
        (POST.replace(b"s H", b"s?%s H" % (b"q" * 9000)) + b"\r\n", error(414, "the URL is too long")),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_in_openais_form(data: bytes, told: Any, one: Door) -> None:
    assert asked(one, data) == told


def test_forms_are_refused(one: Door) -> None:
    kind = {"content-type": "multipart/form-data; boundary=x"}
    status, _, content = one.ask(b"--x\r\n", "/v1/audio/transcriptions", kind)
    said = "send the body as JSON: forms, such as those with files, are not taken"
    assert (status, content["error"]["message"]) == (415, said)


def test_a_body_that_is_shorter_than_announced(one: Door) -> None:
    data = json.dumps(chat("a")).encode()
    told = error(400, "the request ended before its body was complete")
    assert asked(one, POST + b"content-length: %d\r\n\r\n" % (len(data) + 1) + data, ends=True) == told


def test_the_server_as_a_whole_takes_so_many_requests(tmp_path: Path) -> None:
    listen = {"http": "127.0.0.1:0", "max_in_flight": 1}
    with door(tmp_path, model("a"), model("b/c"), model("b_c"), listen=listen) as it:
        with contextlib.closing(it.connect()) as connection:
            connection.request("POST", "/v1/chat/completions", json.dumps(chat("a", "hold", stream=True)))
            assert connection.getresponse().readline()
            status, headers, content = it.chat("b_c")
            assert (status, content["error"]["message"]) == (429, "the server has 1 request in flight already")
            assert (content["error"]["code"], int(headers["retry-after"])) == ("server_full", 1)
            assert it.row("b_c")["outcomes"] == {"full": 1}
        it.until("a", lambda row: row["open"] == 0)
        assert [it.chat(name)[0] for name in ("b/c", "b_c")] == [200, 200]
        assert [path.name for path in sorted(it.logs.iterdir())] == ["a.log", "b%2Fc.log", "b_c.log"]


@pytest.mark.parametrize(
    ("body", "path", "allow", "use"),
    [
        (None, "/v1/chat/completions", "POST", "use POST"),
        ({}, "/metrics", "GET, HEAD", "use GET or HEAD"),
        ({}, "/v1/models", "GET, HEAD", "use GET or HEAD"),
    ],
)
def test_a_wrong_method_is_told_the_right_one(one: Door, body: Any, path: str, allow: str, use: str) -> None:
    status, headers, content = one.ask(body, path)
    assert (status, headers["allow"], content["error"]["code"]) == (405, allow, "method_not_allowed")
    assert content["error"]["message"].endswith(use)
