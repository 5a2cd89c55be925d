"""Client of the agent's control socket."""

from __future__ import annotations

import socket
from pathlib import Path

from cotenant.agent.processes import peer_of
from cotenant.core.errors import LostServerError, WorkError
from cotenant.core.folders import CONTROL_SOCKET
from cotenant.core.lines import LineClient


class ControlClient(LineClient):
    """One connection to an agent's control socket. Creating it raises LostServerError if no agent answers, WorkError if
    this user may not connect.
    """

    def __init__(self, folder: Path, timeout_s: float = 60.0) -> None:
        self.path = folder / CONTROL_SOCKET
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(self.path))
        except OSError as error:
            connection.close()
            if isinstance(error, PermissionError):
                raise WorkError(
                    f"this user may not connect to the agent at {self.path}: it must run with --socket-mode 666, "
                    "or start your own with cotenant agent"
                ) from None
            raise LostServerError(
                f"no agent answers at {self.path} ({error.strerror or error}): start one with cotenant agent"
            ) from None
        super().__init__(connection, "agent", str(self.path))

    def server_uid(self) -> int:
        """Return the user id of the agent."""
        return peer_of(self._socket).uid
