"""A small server of the Open Inference Protocol for tests of clients. A function decides the answer to each request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus

_ID = re.compile(rb'"id":"([^"]*)"')


@dataclass
class Reply:
    """The answer to one request: a status with headers after `delay_s`. None closes the connection without an
    answer."""

    delay_s: float = 0.0
    status: int | None = 200
    headers: dict[str, str] = field(default_factory=dict)
    id: str | None = None  # id of the answer, if it shall differ from the request's
    model: str | None = None
    chunked: bool = False
    twice: bool = False


@dataclass
class Seen:
    """A received request: time on the event loop's clock in seconds, model, and position in the order of arrival."""

    at_s: float
    model: str
    id: str
    number: int
    size: int
    head: bytes


class Standin:
    """Answers /v2/models/NAME with one FP32 input of shape [-1, 4] and infer requests by `behave(seen)`."""

    def __init__(self, models: dict[str, Callable[[Seen], Reply]], status: dict[str, object] | None = None) -> None:
        self.models, self.status = models, status
        self.seen: list[Seen] = []
        self.connections = 0
        self.url = ""

    async def client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
                body = await reader.readexactly(int(length.group(1))) if length else b""
                if not await self.answer(head, body, writer):
                    break
        writer.close()

    async def answer(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> bool:
        path = head.split(b" ", 2)[1].decode()
        if path == "/cotenant/status":
            writer.write(http(200 if self.status is not None else 404, json.dumps(self.status).encode()))
            return True
        model = path.split("/")[3] if path.startswith("/v2/models/") else ""
        if model not in self.models:
            writer.write(http(404, b'{"error":"no such model"}'))
            return True
        if not path.endswith("/infer"):
            form = {"name": model, "inputs": [{"name": "X", "datatype": "FP32", "shape": [-1, 4]}], "outputs": []}
            writer.write(http(200, json.dumps(form).encode()))
            return True
        found = _ID.search(body)
        now = asyncio.get_running_loop().time()
        seen = Seen(now, model, found.group(1).decode() if found else "", len(self.seen), len(body), head)
        self.seen.append(seen)
        reply = self.models[model](seen)
        if reply.delay_s:
            await asyncio.sleep(reply.delay_s)
        if reply.status is None:
            return False
        content = b""
        if reply.status == 200:
            content = json.dumps(
                {"model_name": reply.model or model, "id": reply.id or seen.id, "outputs": []}, separators=(",", ":")
            ).encode()
        for _ in range(2 if reply.twice else 1):
            writer.write(http(reply.status, content, reply.headers, reply.chunked))
        return True


def http(status: int, body: bytes, headers: dict[str, str] | None = None, chunked: bool = False) -> bytes:
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{k}: {v}" for k, v in (headers or {}).items())]
    if chunked:
        half = len(body) // 2
        parts = b"".join(b"%x\r\n%b\r\n" % (len(x), x) for x in (body[:half], body[half:]) if x)
        return "\r\n".join([*lines, "Transfer-Encoding: chunked", "", ""]).encode() + parts + b"0\r\n\r\n"
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


@contextlib.contextmanager
def standin(models: dict[str, Callable[[Seen], Reply]], status: dict[str, object] | None = None) -> Iterator[Standin]:
    """Serve from a thread of this process."""
    server = Standin(models, status)
    loop = asyncio.new_event_loop()
    started: threading.Event = threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        made = await asyncio.start_server(server.client, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{made.sockets[0].getsockname()[1]}"
        started.set()
        await stop.wait()
        made.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
