"""The live page on the server's own port: its HTML, its rows, and the stream of their changes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol
from urllib.parse import parse_qs, urlsplit

from cotenant.core.background import spawn
from cotenant.observability.feed import Feed
from cotenant.observability.http import MOST_VIEWERS, SECURITY, is_loopback, page
from cotenant.serving.dispatch.calls import Kind, Refusal
from cotenant.serving.gateway.http1 import Exchange

PAGE = f"content-type: text/html; charset=utf-8\r\n{SECURITY}".encode()
EVENTS = f"content-type: text/event-stream\r\n{SECURITY}".encode()
MOST_BEHIND = 4 << 20  # a viewer is disconnected if more bytes than this wait until it reads them


class Decisions:
    """The latest decisions of a server, as `rows` of number, Unix time and sentence."""

    def __init__(self) -> None:
        self.rows: deque[tuple[int, float, str]] = deque(maxlen=50)

    def add(self, text: str) -> None:
        """Add the sentence of a decision."""
        self.rows.append((self.rows[-1][0] + 1 if self.rows else 0, time.time(), text))


class Tell(Protocol):
    """Takes a sentence about what a server decided or what happened to it, with the level at which it is logged."""

    def __call__(self, text: str, level: int = logging.INFO) -> None:
        """Take a sentence."""


class Pages:
    """The live page. `address`: the URL of this endpoint."""

    def __init__(self, feed: Feed, address: Callable[[], str]) -> None:
        self._feed, self._address = feed, address
        self._viewers: set[asyncio.Task[None]] = set()

    def may_see(self, x: Exchange) -> bool:
        """Protects from DNS rebinding: a foreign page whose host name resolves to this machine must not read the
        server's pages.
        """
        if not is_loopback(urlsplit(self._address()).hostname or ""):
            return True
        host = x.headers.get(b"host", b"localhost").decode("latin-1")
        try:
            return is_loopback(urlsplit("//" + host).hostname or "")
        except ValueError:  # the host name in the header begins with a bracket that is not closed
            return False

    def page(self, x: Exchange) -> None:
        """Answer with the HTML of the live page."""
        x.respond(200, page(), PAGE)

    async def state(self) -> bytes:
        """Answer with all rows of the live page, once."""
        return (await self._feed.snapshot()).encode()

    def events(self, x: Exchange) -> None:
        """Send a viewer all rows, then only changed rows."""
        if len(self._viewers) >= MOST_VIEWERS:
            raise Refusal(Kind.UNAVAILABLE, f"this page already has {MOST_VIEWERS} viewers", 10.0)
        transport = x.stream(EVENTS)
        if transport is None:
            raise Refusal(Kind.WRONG, "a stream of events cannot be pipelined")

        async def run() -> None:
            async for event in self._feed.events():
                if transport.is_closing() or transport.get_write_buffer_size() > MOST_BEHIND:
                    break
                transport.write(event)
            transport.abort()

        spawn(self._viewers, run())

    async def close(self) -> None:
        """Disconnect all browsers that show the live page."""
        for task in self._viewers:
            task.cancel()
        await asyncio.gather(*self._viewers, return_exceptions=True)
        await self._feed.close()


def token_in(url: bytes) -> bytes:
    """Return the token of `?token=` in a page's address, in the form of the value of an Authorization header. A user
    who opens the page in a browser can give the token in the address, but not in that header.
    """
    query = url.partition(b"?")[2].decode("latin-1").replace("+", "%2B")
    return b"Bearer " + "".join(parse_qs(query).get("token", [])).encode()
