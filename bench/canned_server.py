"""A server that answers every inference request with a fixed response, to measure clients. `python canned_server.py`
prints its port."""

from __future__ import annotations

import asyncio
import re

import uvloop

ID = re.compile(rb'"id":"([^"]*)"')
LENGTH = re.compile(rb"\r\nContent-Length: (\d+)")
FORM = b'{"inputs":[{"name":"X","datatype":"FP32","shape":[-1,4]}]}'


class Canned(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            found = LENGTH.search(self.buffer[: end + 2])
            size = end + 4 + (int(found.group(1)) if found else 0)
            if len(self.buffer) < size:
                return
            number = ID.search(self.buffer[end + 4 : size])
            self.buffer = self.buffer[size:]
            body = FORM if number is None else b'{"model_name":"a","id":"%b","outputs":[]}' % number.group(1)
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))  # type: ignore[attr-defined]


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Canned, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
