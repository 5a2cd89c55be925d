"""The control socket: one JSON object a line, asked by the command line and the launcher."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from cotenant.agent.processes import Peer, peer_of
from cotenant.core.errors import InputError, WorkError

MAX_LINE = 64 << 10
MAX_CALLERS = 4096  # of one user; a launcher keeps one while its program runs

Handler = Callable[["Caller", dict[str, Any]], Awaitable[dict[str, Any]]]


def most_callers() -> int:
    """How many connections one user may hold: a quarter of the agent's descriptors, for the tenants need theirs."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_CALLERS if soft == resource.RLIM_INFINITY else min(MAX_CALLERS, soft // 4)


class Caller:
    """Who is on a control connection, and what hangs on its life."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.registered: list[str] = []  # tenants that this launcher has registered and not started yet
        self.undo: list[Callable[[], None]] = []  # what it ordered for as long as it is there

    @property
    def trusted(self) -> bool:
        """Root and the agent's own user may do everything."""
        return self.peer.uid in (0, os.geteuid())


class ControlServer:
    """Listens on a unix stream socket."""

    def __init__(
        self, path: Path, operations: dict[str, Handler], on_gone: Callable[[Caller], None], log: Callable[[str], None]
    ) -> None:
        self.path = path
        self._operations = operations
        self._on_gone = on_gone
        self._log = log
        self._server: asyncio.AbstractServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._callers: Counter[int] = Counter()  # connections by user

    async def listen(self, mode: int) -> None:
        """Open the socket."""
        self.path.unlink(missing_ok=True)
        try:
            self._server = await asyncio.start_unix_server(self._serve, str(self.path), limit=MAX_LINE, backlog=1024)
            os.chmod(self.path, mode)
        except OSError as error:
            raise WorkError(f"{self.path}: cannot listen: {error.strerror or error}") from None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        raw: socket.socket = writer.get_extra_info("socket")._sock
        caller = Caller(peer_of(raw))
        self._callers[caller.peer.uid] += 1
        try:
            most = most_callers()
            if self._callers[caller.peer.uid] > most:
                await asyncio.wait_for(reader.readline(), 1.0)  # an answer is read only after the order is sent
                text = f"user {caller.peer.uid} already has {most} connections to this agent"
                writer.write(json.dumps({"error": text, "kind": "work"}).encode() + b"\n")
                return
            while line := await reader.readline():
                writer.write(json.dumps(await self._answer(caller, line)).encode() + b"\n")
                await writer.drain()
        except (ConnectionError, TimeoutError, ValueError, asyncio.CancelledError):
            pass  # gone, or a line over the limit
        finally:
            self._tasks.discard(task)
            self._callers[caller.peer.uid] -= 1
            if not self._callers[caller.peer.uid]:
                del self._callers[caller.peer.uid]
            self._on_gone(caller)
            for undo in reversed(caller.undo):
                undo()
            writer.close()

    async def _answer(self, caller: Caller, line: bytes) -> dict[str, Any]:
        try:
            order = json.loads(line)
        except (ValueError, RecursionError):
            return {"error": "not a JSON object", "kind": "input"}
        if not isinstance(order, dict) or not isinstance(order.get("op"), str):
            return {"error": "an order is a JSON object with an op", "kind": "input"}
        operation = self._operations.get(order["op"])
        if operation is None:
            return {"error": f"unknown op {order['op']!r}", "kind": "input"}
        try:
            return await operation(caller, order)
        except InputError as error:
            return {"error": error.message, "field": error.field, "kind": "input"}
        except WorkError as error:
            return {"error": str(error), "kind": "work"}
        except Exception as error:  # a fault of ours must not take the agent down
            self._log(f"the order {order.get('op')} failed: {error!r}")
            return {"error": f"the agent failed on this order: {error}", "kind": "work"}

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            for task in list(self._tasks):
                task.cancel()
            self.path.unlink(missing_ok=True)
