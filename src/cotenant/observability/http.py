"""A small HTTP server for the live page and the metrics. It answers only GET and HEAD; the size of a request and the
numbers of connections and viewers are limited."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable
from importlib import resources
from urllib.parse import parse_qs, urlsplit

from cotenant.core.errors import InputError, WorkError
from cotenant.observability.exposition import CONTENT_TYPE
from cotenant.observability.feed import Feed

MOST_CONNECTIONS = 256
MOST_VIEWERS = 64
HEAD_BYTES = 8192
READ_WITHIN_S = 10.0
STUCK_S = 20.0  # a client that has read nothing for this many seconds is disconnected
SECURITY = (
    "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:\r\nX-Content-Type-Options: nosniff\r\nCache-Control: no-store\r\n"
)
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found",
            405: "Method Not Allowed", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}  # fmt: skip

# a valid Host header: a name, an IPv4 address, an IPv6 address in brackets (with an interface after %), or nothing
HOST = re.compile(r"[\w.-]*|\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]")

Metrics = Callable[[], Awaitable[str]]


def page() -> bytes:
    """Return the live page as one self-contained HTML file."""
    assets = resources.files("cotenant.observability") / "assets"
    html = (assets / "live.html").read_text(encoding="utf-8")
    html = html.replace("/*CSS*/", (assets / "live.css").read_text(encoding="utf-8"))
    return html.replace("/*JS*/", (assets / "live.js").read_text(encoding="utf-8")).encode()


def parse_address(text: str, field: str) -> tuple[str, int]:
    """Parse HOST:PORT or :PORT (loopback), IPv6 as [::1]:9400, into host and port. Port 0 means any free port. Raises
    InputError with `field`."""
    host, colon, port = text.strip().rpartition(":")
    if re.fullmatch(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*", host):
        raise InputError(f"{text!r}: write an IPv6 address in brackets, as in [::1]:9400", field=field)
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535 or not HOST.fullmatch(host):
        hint = f"; write :{port} for this machine only" if port.isdigit() and not colon else ""
        raise InputError(f"{text!r} is not an address HOST:PORT{hint}", field=field)
    return host.strip("[]") or "127.0.0.1", int(port)


def is_loopback(host: str) -> bool:
    """Whether the host is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class LiveServer:
    """Serves /, /state.json, /events, /metrics and /healthz. `token`: bearer token required for all but /healthz."""

    def __init__(self, host: str, port: int, feed: Feed, metrics: Metrics, token: str | None = None) -> None:
        self.host, self.port = host, port
        self._feed = feed
        self._metrics = metrics
        self._token = token
        self._server: asyncio.AbstractServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._viewers = 0

    async def start(self) -> None:
        """Listen for viewers; `port` 0 is replaced by a free port. Raises WorkError if the address cannot be used."""
        try:
            self._server = await asyncio.start_server(self._serve, self.host, self.port, limit=HEAD_BYTES)
        except OSError as error:
            # asyncio's message begins with the address, which this message states already
            why = (error.strerror or str(error)).rpartition("): ")[2]
            raise WorkError(f"cannot listen on {self.host}:{self.port}: {why}") from None
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        """Return the URL of the live page."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def close(self) -> None:
        """Stop listening and disconnect all clients."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._feed.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) > MOST_CONNECTIONS:
                await _answer(writer, 503, "too many connections\n")
                return
            try:
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), READ_WITHIN_S)
            except asyncio.LimitOverrunError:
                await _answer(writer, 431, "the request's head is too long\n")
                return
            await self._route(head.decode("latin-1"), reader, writer)
        except (ConnectionError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            with contextlib.suppress(Exception):
                writer.close()

    async def _route(self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *rest = head.split("\r\n")
        words = first.split(" ")
        headers = {
            key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in rest if line)
        }
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            await _answer(writer, 400, "not an HTTP request\n")
            return
        if words[0] not in ("GET", "HEAD"):
            await _answer(writer, 405, "only GET and HEAD are allowed\n", "Allow: GET, HEAD\r\n")
            return
        try:
            url, asked = urlsplit(words[1]), urlsplit("//" + headers.get("host", "localhost")).hostname
        except ValueError:  # the host has an unbalanced bracket
            await _answer(writer, 400, "the URL or the Host header is not valid\n")
            return
        if url.path == "/healthz":
            await _answer(writer, 200, "ok\n")
            return
        # Protects against DNS rebinding: a web page whose host name resolves to a loopback address must not read this
        # server.
        if is_loopback(self.host) and not is_loopback(asked or ""):
            await _answer(writer, 403, "this address answers to localhost only\n")
            return
        if self._token is not None and not self._shows_token(headers, url.query):
            await _answer(writer, 401, "a valid bearer token is required\n", "WWW-Authenticate: Bearer\r\n")
            return
        only_head = words[0] == "HEAD"
        if url.path == "/":
            await _answer(writer, 200, b"" if only_head else page(), kind="text/html; charset=utf-8")
        elif url.path == "/metrics":
            await _answer(writer, 200, "" if only_head else await self._metrics(), kind=CONTENT_TYPE)
        elif url.path == "/state.json":
            await _answer(writer, 200, "" if only_head else await self._feed.snapshot(), kind="application/json")
        elif url.path == "/events":
            await self._stream(reader, writer)
        else:
            await _answer(writer, 404, "paths: /, /metrics, /state.json, /events and /healthz\n")

    def _shows_token(self, headers: dict[str, str], query: str) -> bool:
        assert self._token is not None
        # tokens in base64 may contain a plus, which browsers do not escape and parse_qs would read as a space
        asked = parse_qs(query.replace("+", "%2B"))
        shown = headers.get("authorization", "").removeprefix("Bearer ") or "".join(asked.get("token", [""]))
        return hmac.compare_digest(shown.encode(), self._token.encode())

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._viewers >= MOST_VIEWERS:
            await _answer(writer, 503, "too many viewers\n")
            return
        self._viewers += 1
        # a viewer sends nothing after its request, so a further byte or the end of the stream means that it has left
        tasks = {asyncio.create_task(self._send(writer)), asyncio.create_task(reader.read(1))}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._viewers -= 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        events = self._feed.events()
        try:
            head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n{SECURITY}\r\n"
            writer.write(head.encode())
            async for event in events:
                writer.write(event)
                await asyncio.wait_for(writer.drain(), STUCK_S)
        finally:
            await events.aclose()  # type: ignore[attr-defined]


async def _answer(
    writer: asyncio.StreamWriter,
    status: int,
    body: str | bytes,
    more: str = "",
    kind: str = "text/plain; charset=utf-8",
) -> None:
    raw = body.encode() if isinstance(body, str) else body
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(raw)}\r\n"
    writer.write(f"{head}Connection: close\r\n{SECURITY}{more}\r\n".encode() + raw)
    await asyncio.wait_for(writer.drain(), STUCK_S)
