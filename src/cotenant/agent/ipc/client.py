"""A caller of the agent's control socket."""

from __future__ import annotations

import socket
from pathlib import Path

from cotenant.core.errors import WorkError
from cotenant.core.lines import LineClient


class ControlClient(LineClient):
    """One connection to an agent. Raises WorkError when there is none."""

    def __init__(self, folder: Path, timeout_s: float = 60.0) -> None:
        self.path = folder / "control.sock"
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(self.path))
        except OSError as error:
            connection.close()
            raise WorkError(
                f"no agent answers at {self.path} ({error.strerror or error}): start one with cotenant agent"
            ) from None
        super().__init__(connection, "agent", str(self.path))
