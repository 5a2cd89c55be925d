"""Detects that an MPS server has died: every program on it is lost, and its tenant must be informed."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable
from typing import Protocol


class MpsDaemons(Protocol):
    """The MPS control daemons to watch."""

    def watched(self) -> tuple[str, ...]:
        """UUIDs of the GPUs that currently have a server."""

    def server(self, uuid: str) -> int | None:
        """Pid of a GPU's server; None if there is none."""


class MpsWatch:
    """Checks the servers of this agent's daemons about twice a second. The daemon is asked once for a server's pid, in
    a thread (10 ms); after that a pidfd reports its end.
    """

    PERIOD_S = 0.4

    def __init__(self, mps: MpsDaemons, died: Callable[[str], None]) -> None:
        """`died` is called with a GPU's UUID."""
        self._mps, self._died = mps, died
        self._servers: dict[str, tuple[int, int]] = {}  # UUID -> (pid, pidfd)

    async def run(self) -> None:
        """Run as long as the agent."""
        try:
            while True:
                await asyncio.sleep(self.PERIOD_S)
                await self.look()
        finally:
            for _, fd in self._servers.values():
                os.close(fd)
            self._servers.clear()

    async def look(self) -> None:
        """Check once."""
        for uuid in self._mps.watched():
            if uuid not in self._servers:
                pid = await asyncio.to_thread(self._mps.server, uuid)
                if pid is None:
                    continue
                try:
                    self._servers[uuid] = (pid, os.pidfd_open(pid))
                except OSError:
                    continue  # the server has already ended: the next check asks for its successor
        for uuid, (_, fd) in list(self._servers.items()):
            if select.select([fd], [], [], 0)[0]:
                os.close(fd)
                del self._servers[uuid]
                if uuid in self._mps.watched():  # otherwise its last tenant has left, and the server with it
                    self._died(uuid)
