"""Callers of sockets that speak JSON lines: one order, one answer. The agent's control socket is one."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any, Self

from cotenant.core.errors import InputError, WorkError


class LineClient:
    """An open connection to `who` (the agent, the fleet) at `where`. Raises InputError or WorkError as it answers."""

    def __init__(self, connection: socket.socket, who: str, where: str) -> None:
        self._socket = connection
        self._file = connection.makefile("rb")
        self._peer = f"the {who} at {where}"

    def call(self, op: str, **order: Any) -> dict[str, Any]:
        """Send one order and return the answer."""
        try:
            self._socket.sendall(json.dumps({"op": op} | order).encode() + b"\n")
            line = self._file.readline()
        except OSError as error:
            raise WorkError(f"{self._peer} does not answer: {error.strerror or error}") from None
        if not line:
            raise WorkError(f"{self._peer} has gone")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            if answer.get("kind") == "input":
                raise InputError(answer["error"], field=answer.get("field"), file=answer.get("file"))
            raise WorkError(answer["error"])
        return answer

    def close(self) -> None:
        """Hang up."""
        self._file.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
