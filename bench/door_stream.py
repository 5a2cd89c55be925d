"""Streams with a known rate, to measure the models endpoint: an engine without a model, a client without a parser, and
another proxy to compare with.

python bench/door_stream.py engine PORT EVENTS GAP_S      answers every POST with a stream, without delay at its start
python bench/door_stream.py proxy PORT TARGET_PORT        a plain proxy with aiohttp's server and client, for comparison
python bench/door_stream.py client PORT MODEL STREAMS SECONDS     prints the times of first events as JSON
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

DELTA = b'{"index":0,"delta":{"content":" tok"}}'
EVENT = b'data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[%s]}\n\n' % DELTA
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LIST = b'{"object":"list","data":[{"id":"m"}]}'
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
LAST = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Engine(asyncio.Protocol):
    def __init__(self, events: int, gap_s: float) -> None:
        self.events, self.gap_s = events, gap_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"GET"):
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(LIST), LIST))
        elif b"\r\n\r\n" in data:  # a small request arrives in one piece
            self.transport.write(HEAD + CHUNK)
            asyncio.get_running_loop().call_later(self.gap_s, self.go_on, 1)

    def go_on(self, sent: int) -> None:
        if self.transport.is_closing():
            return
        self.transport.write(CHUNK if sent < self.events else LAST)
        if sent < self.events:
            asyncio.get_running_loop().call_later(self.gap_s, self.go_on, sent + 1)


class Client(asyncio.Protocol):
    """A client that requests one stream after the other."""

    def __init__(self, request: bytes, found: list[float]) -> None:
        self.request, self.found = request, found

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        asyncio.get_running_loop().call_later(random.random(), self.ask)

    def ask(self) -> None:
        self.began, self.first = time.perf_counter(), False
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        if not self.first and b"data: " in data:
            self.first = True
            self.found.append(time.perf_counter() - self.began)
        if data.endswith(b"0\r\n\r\n"):
            asyncio.get_running_loop().call_later(0.1 * random.random(), self.ask)


async def engine(port: int, events: int, gap_s: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Engine(events, gap_s), "127.0.0.1", port)
    await server.serve_forever()


async def client(port: int, model: str, streams: int, seconds: float) -> None:
    body = json.dumps({"model": model, "stream": True, "messages": [{"role": "user", "content": "x" * 500}]}).encode()
    request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    found: list[float] = []
    loop = asyncio.get_running_loop()
    for _ in range(streams):
        await loop.create_connection(lambda: Client(request, found), "127.0.0.1", port)
    await asyncio.sleep(1.0)
    found.clear()
    await asyncio.sleep(seconds)
    print(json.dumps(found))


async def proxy(port: int, target: int) -> None:
    from aiohttp import ClientSession, TCPConnector, web

    session = ClientSession(connector=TCPConnector(limit=0))

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        json.loads(body)
        async with session.post(f"http://127.0.0.1:{target}{request.path_qs}", data=body) as got:
            answer = web.StreamResponse(status=got.status, headers={"content-type": got.headers["content-type"]})
            await answer.prepare(request)
            async for piece in got.content.iter_any():
                await answer.write(piece)
            await answer.write_eof()
            return answer

    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


def main() -> None:
    import uvloop

    what, port, *rest = sys.argv[1:]
    if what == "engine":
        uvloop.run(engine(int(port), int(rest[0]), float(rest[1])))
    elif what == "proxy":
        uvloop.run(proxy(int(port), int(rest[0])))
    else:
        uvloop.run(client(int(port), rest[0], int(rest[1]), float(rest[2])))


if __name__ == "__main__":
    main()
