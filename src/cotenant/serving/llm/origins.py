"""Lets web pages of given origins call the server (CORS)."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.serving.gateway.http1 import Exchange

ANY = "*"
EXPOSED = b"access-control-expose-headers: x-request-id, retry-after, cotenant-queued-ms\r\n"
PREFLIGHT_S = 600  # for how long browsers need not ask again


class Origins:
    """The origins whose pages may call OpenAI's API; ANY stands for all."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._all = ANY in origins
        self._known = {origin.encode() for origin in origins}

    def headers(self, x: Exchange) -> bytes:
        """Return the headers that let the page read the answer; empty if the request is not one of such a page."""
        origin = x.headers.get(b"origin")
        if origin is None or not (self._all or origin in self._known):
            return b""
        allowed = b"*" if self._all else origin
        return b"access-control-allow-origin: %s\r\nvary: origin\r\n%s" % (allowed, EXPOSED)

    def asks_first(self, x: Exchange) -> bool:
        """Whether a browser asks which requests it may send; such a question has no key."""
        return x.method == b"OPTIONS" and b"access-control-request-method" in x.headers and bool(self.headers(x))

    def answer(self, x: Exchange) -> None:
        """Answer that it may send all requests of the API."""
        lines = b"access-control-allow-methods: GET, HEAD, POST\r\naccess-control-max-age: %d\r\n" % PREFLIGHT_S
        wanted = x.headers.get(b"access-control-request-headers")
        x.respond(200, b"", lines + (b"" if wanted is None else b"access-control-allow-headers: %s\r\n" % wanted))
