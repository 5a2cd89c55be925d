"""Web pages of other origins call the models from a browser only where the file names their origin."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from models_door import Door, chat, door, model

ALLOW = "access-control-allow-origin"
PAGE = {"origin": "https://chat.example"}


@contextlib.contextmanager
def listening(folder: Path, origins: list[str]) -> Any:
    (folder / "keys").write_text("my-own-key\n")
    listen = {"http": "127.0.0.1:0", "tokens": str(folder / "keys"), "origins": origins}
    with door(folder, model("a"), listen=listen) as it:
        yield it


def first(it: Door, headers: dict[str, str]) -> tuple[int, dict[str, str]]:
    """What a browser asks before a request with a key."""
    with contextlib.closing(it.connect()) as connection:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-os"}
        connection.request("OPTIONS", "/v1/chat/completions", headers=headers | asked)
        got = connection.getresponse()
        got.read()
        return got.status, {name.lower(): value for name, value in got.getheaders()}


@pytest.mark.parametrize(("origins", "allowed"), [(["*"], "*"), (["http://x:1", PAGE["origin"]], PAGE["origin"])])
def test_a_page_of_a_named_origin_may_call(tmp_path: Path, origins: list[str], allowed: str) -> None:
    with listening(tmp_path, origins) as it:
        status, headers = first(it, PAGE)
        assert (status, headers[ALLOW], headers["access-control-allow-methods"]) == (200, allowed, "GET, HEAD, POST")
        assert headers["access-control-allow-headers"] == "authorization,x-os"
        key = PAGE | {"authorization": "Bearer my-own-key"}
        for body, path, status in (
            (chat("a"), "/v1/chat/completions", 200), (chat("a", stream=True), "/v1/chat/completions", 200),
            (chat("b"), "/v1/chat/completions", 404), (None, "/v1/models", 200),
        ):  # fmt: skip
            got, headers, _ = it.ask(body, path, key)
            assert (got, headers[ALLOW]) == (status, allowed), path
        assert it.ask(chat("a"), headers=PAGE)[1][ALLOW] == allowed, "the page may read that its key is missing"
        assert ALLOW not in it.ask(None, "/cotenant/status", key)[1]


@pytest.mark.parametrize("origins", [[], ["https://other.example"]])
def test_other_pages_may_not(tmp_path: Path, origins: list[str]) -> None:
    with listening(tmp_path, origins) as it:
        status, headers = first(it, PAGE)
        assert status == 401 or ALLOW not in headers
        assert ALLOW not in it.ask(chat("a"), headers=PAGE | {"authorization": "Bearer my-own-key"})[1]
