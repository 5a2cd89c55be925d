"""The control socket: one JSON object per line, used by the command line and the launcher."""

from __future__ import annotations

import os
import resource
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from cotenant.agent.processes import Peer, peer_of
from cotenant.core.errors import InputError, WorkError
from cotenant.core.line_server import Lines, LineServer
from cotenant.core.lines import encode, failure, order_of

MAX_LINE = 64 << 10
MAX_CALLERS = 4096  # largest number of connections of one user; a launcher keeps one open while its program runs

Handler = Callable[["Caller", dict[str, Any]], Awaitable[dict[str, Any]]]


def most_callers() -> int:
    """Return how many connections to the control socket one user may have: a quarter of the agent's file descriptors,
    since tenants need the remaining ones.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_CALLERS if soft == resource.RLIM_INFINITY else min(MAX_CALLERS, soft // 4)


class Caller:
    """The client of one connection to the control socket, and what must be undone when the connection closes."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        # names of tenants that this launcher registered and whose programs it has not started yet
        self.registered: list[str] = []
        self.undo: list[Callable[[], None]] = []  # functions that undo orders whose effect ends with the connection

    @property
    def trusted(self) -> bool:
        """Return whether the client may send every order: root and the agent's own user may."""
        return self.peer.uid in (0, os.geteuid())


class ControlServer:
    """Serves the control socket, a unix stream socket. Its requests are called orders."""

    def __init__(
        self,
        path: Path,
        operations: dict[str, Handler],
        on_gone: Callable[[Caller], None],
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        """`settle` is called before each answer: it saves what the order has changed, so that the agent's next start
        knows all that has been answered, even if this one is killed.
        """
        self.path = path
        self._settle = settle
        self._operations = operations
        self._on_gone = on_gone
        self._server = LineServer(self._admit, self._answer, self._gone, most_bytes=MAX_LINE)
        self._callers: Counter[int] = Counter()  # uid -> number of the user's connections

    async def listen(self, mode: int) -> None:
        """Open the control socket."""
        await self._server.listen(self.path, mode)

    async def _admit(self, connection: socket.socket, lines: Lines) -> Caller:
        caller, most = Caller(peer_of(connection)), most_callers()
        if self._callers[caller.peer.uid] >= most:
            raise WorkError(f"user {caller.peer.uid} already has {most} connections to this agent")
        self._callers[caller.peer.uid] += 1
        return caller

    def _gone(self, caller: Caller) -> None:
        self._callers[caller.peer.uid] -= 1
        if not self._callers[caller.peer.uid]:
            del self._callers[caller.peer.uid]
        self._on_gone(caller)
        for undo in reversed(caller.undo):
            undo()

    async def _answer(self, caller: Caller, line: bytes) -> bytes:
        try:
            order = order_of(line)
            operation = self._operations.get(order["op"])
            if operation is None:
                raise InputError(f"unknown operation {order['op']!r}")
            answer = await operation(caller, order)
            self._settle()
            return encode(answer)
        except Exception as error:
            return encode(failure(error, "agent"))

    async def close(self) -> None:
        """Stop listening."""
        self._server.close()
        self._server.hang_up()
        self.path.unlink(missing_ok=True)
