"""The server for requests and answers as JSON lines (lines.py), with limits on line length, number of connections and
idle time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Generic, TypeVar

from cotenant.core.errors import InputError, WorkError
from cotenant.core.lines import encode, failure

C = TypeVar("C")
# a refused client reads its answer only after it has sent a request, for which the server waits at most this long
REFUSED_S = 1.0
CHUNK = 1 << 16


class Lines:
    """Reads lines from a client's stream. Buffers at most one line and one chunk."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._held = bytearray()

    async def next(self, most: int) -> bytes:
        """Return the next line; empty at the end of the stream. Raises InputError if the line has more than `most`
        bytes.
        """
        seen = 0
        while (end := self._held.find(b"\n", seen)) < 0:
            seen = len(self._held)
            if seen > most:
                raise InputError(f"an order may have at most {most} bytes")
            chunk = await self._reader.read(CHUNK)
            if not chunk:
                end = seen - 1
                break
            self._held += chunk
        line = bytes(self._held[: end + 1])
        if len(line) > most:
            raise InputError(f"an order may have at most {most} bytes")
        del self._held[: end + 1]
        return line


class LineServer(Generic[C]):
    """Answers clients' requests (orders), one at a time per connection.

    `admit` gets a new connection, may read lines from it, and returns an object that stands for the caller; it raises
    InputError or WorkError to refuse the connection. `answer` executes a line. `gone` is called once for each admitted
    caller, when its connection has ended. `idle_s`: how long a caller may send nothing; None: unlimited.
    """

    def __init__(
        self, admit: Callable[[socket.socket, Lines], Awaitable[C]], answer: Callable[[C, bytes], Awaitable[bytes]],
        gone: Callable[[C], None], *, most_bytes: int, idle_s: float | None = None,
    ) -> None:  # fmt: skip
        self._admit, self._answer, self._gone = admit, answer, gone
        self._most, self._idle_s = most_bytes, idle_s
        self._servers: list[asyncio.AbstractServer] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: set[asyncio.Task[None]] = set()  # tasks of connections that wait for a client's request
        self._closed = False

    async def listen(self, path: Path, mode: int) -> None:
        """Listen for clients on a unix socket. Raises WorkError if that fails."""
        path.unlink(missing_ok=True)
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            made.bind(str(path))
            os.chmod(path, mode)  # the mode is set before clients can connect, that is, before the server listens
            self._servers.append(await asyncio.start_unix_server(self._serve, sock=made, limit=CHUNK, backlog=1024))
        except OSError as error:
            made.close()
            raise WorkError(f"{path}: cannot listen: {error.strerror or error}") from None

    async def listen_loopback(self, port: int) -> int:
        """Listen for clients on a port of 127.0.0.1 (0: any free one) and return it. Raises WorkError if that fails."""
        try:
            server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=CHUNK, backlog=128)
        except OSError as error:
            raise WorkError(f"127.0.0.1:{port}: cannot listen: {os.strerror(error.errno or 0).lower()}") from None
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        lines = Lines(reader)
        try:
            try:
                caller = await self._admit(writer.get_extra_info("socket")._sock, lines)
            except (InputError, WorkError) as error:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(lines.next(self._most), REFUSED_S)
                writer.write(encode(failure(error)))
                return
            try:
                while not self._closed:
                    self._idle.add(task)
                    line = await asyncio.wait_for(lines.next(self._most), self._idle_s)
                    self._idle.discard(task)
                    if not line:
                        break
                    writer.write(await self._answer(caller, line))
                    await writer.drain()
            finally:
                self._gone(caller)
        # a line was too long, so the connection is closed: the beginning of the next line cannot be found
        except InputError as error:
            writer.write(encode(failure(error)))
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._idle.discard(task)
            writer.close()

    def close(self) -> None:
        """Stop listening, and end each connection: at once if it is idle, else after the answer to its current request.
        """
        self._closed = True
        for server in self._servers:
            server.close()
        for task in list(self._idle):
            task.cancel()

    def hang_up(self) -> None:
        """End all connections of clients at once."""
        for task in list(self._tasks):
            task.cancel()

    async def ended(self) -> None:
        """Wait until all connections of clients have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
