"""Notices that an MPS server has died: every program that ran on it is lost with it, and has to be told."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable
from typing import Protocol


class MpsDaemons(Protocol):
    """The MPS control daemons that are watched."""

    def watched(self) -> tuple[str, ...]:
        """UUIDs of the GPUs that have a server now."""

    def server(self, uuid: str) -> int | None:
        """Number of the server's process on a GPU; None while there is none."""


class MpsWatch:
    """Looks at the servers of this agent's daemons, about twice a second. The daemon is asked for a server's number
    once, in a thread (that takes 10 ms); from then on the kernel tells of its end."""

    PERIOD_S = 0.4

    def __init__(self, mps: MpsDaemons, died: Callable[[str], None]) -> None:
        """`died` is called with a GPU's UUID."""
        self._mps, self._died = mps, died
        self._servers: dict[str, tuple[int, int]] = {}  # UUID -> (pid, pidfd)

    async def run(self) -> None:
        """For as long as the agent lives."""
        try:
            while True:
                await asyncio.sleep(self.PERIOD_S)
                await self.look()
        finally:
            for _, fd in self._servers.values():
                os.close(fd)
            self._servers.clear()

    async def look(self) -> None:
        """Once."""
        for uuid in self._mps.watched():
            if uuid not in self._servers:
                pid = await asyncio.to_thread(self._mps.server, uuid)
                if pid is None:
                    continue
                try:
                    self._servers[uuid] = (pid, os.pidfd_open(pid))
                except OSError:
                    continue  # gone already: the next look asks again
        for uuid, (_, fd) in list(self._servers.items()):
            if select.select([fd], [], [], 0)[0]:
                os.close(fd)
                del self._servers[uuid]
                if uuid in self._mps.watched():  # else its last tenant has left, and it with it
                    self._died(uuid)
