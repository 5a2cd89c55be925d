"""Detects that an MPS server has died. All its client programs fail then, and their tenants must be informed."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable
from typing import Protocol


class Servers(Protocol):
    """Interface of a mechanism whose MPS servers are watched."""

    def watched(self) -> tuple[str, ...]:
        """UUIDs of the GPUs that currently have an MPS server."""

    def server(self, uuid: str) -> int | None:
        """Pid of a GPU's MPS server; None if there is none."""


class MpsWatch:
    """Checks the MPS servers of this agent about twice a second. A server's pid is requested from the daemon once, in a
    thread, since that takes 10 ms; then a pidfd shows when the server ends.
    """

    PERIOD_S = 0.4

    def __init__(self, mps: Servers, died: Callable[[str], None]) -> None:
        """`died` is called with a GPU's UUID when its server has died."""
        self._mps, self._died = mps, died
        self._servers: dict[str, tuple[int, int]] = {}  # GPU's UUID -> (pid, pidfd) of its MPS server

    async def run(self) -> None:
        """Check the MPS servers as long as the agent runs."""
        try:
            while True:
                await asyncio.sleep(self.PERIOD_S)
                await self.look()
        finally:
            for _, fd in self._servers.values():
                os.close(fd)
            self._servers.clear()

    async def look(self) -> None:
        """Check once whether an MPS server has died."""
        for uuid in self._mps.watched():
            if uuid not in self._servers:
                pid = await asyncio.to_thread(self._mps.server, uuid)
                if pid is None:
                    continue
                try:
                    self._servers[uuid] = (pid, os.pidfd_open(pid))
                except OSError:
                    continue  # the server has already ended, and the next check looks for a new one
        for uuid, (_, fd) in list(self._servers.items()):
            if select.select([fd], [], [], 0)[0]:
                os.close(fd)
                del self._servers[uuid]
                # if the GPU is not watched any more, the agent itself ended the server, because no tenants are left
                if uuid in self._mps.watched():
                    self._died(uuid)
