"""A listening socket of the agent with one message per packet. Runs in the agent's event loop."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from cotenant.core.errors import WorkError

LOG = logging.getLogger(__name__)

BACKLOG = 4096
CONNECTIONS_PER_WAKE = 64
FULL_S = 0.5


class Listener:
    """Accepts connections to one of the agent's sockets, and passes each in non-blocking mode to `take`."""

    def __init__(self, path: Path, mode: int, take: Callable[[socket.socket], None]) -> None:
        """Listen at the path `path`; a socket file that a dead agent left at that path is replaced. Raises WorkError.
        """
        self._path, self._take = path, take
        self._loop = asyncio.get_running_loop()
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._socket.bind(str(path))
            os.chmod(path, mode)
            self._socket.listen(BACKLOG)
        except OSError as error:
            self._socket.close()
            raise WorkError(f"{path}: cannot listen: {error.strerror or error}") from None
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(CONNECTIONS_PER_WAKE):
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    # an agent without free descriptors can only serve the existing connections; it accepts new ones
                    # later, when some may have closed
                    LOG.warning(
                        "the agent has no file descriptors left, so new connections wait; raise its limit (ulimit "
                        "-n)"
                    )
                    self._loop.remove_reader(self._socket)
                    self._loop.call_later(FULL_S, self._resume)
                return
            connection.setblocking(False)
            self._take(connection)

    def _resume(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Stop listening and remove the socket's file."""
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._path.unlink(missing_ok=True)
