"""A caller of the agent's control socket: one order, one answer."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from cotenant.model.errors import InputError, WorkError


class ControlClient:
    """One connection. Raises WorkError when there is no agent, InputError or WorkError as the agent answers."""

    def __init__(self, folder: Path, timeout_s: float = 60.0) -> None:
        self.path = folder / "control.sock"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(str(self.path))
        except OSError as error:
            self._socket.close()
            raise WorkError(
                f"no agent answers at {self.path} ({error.strerror or error}): start one with cotenant agent"
            ) from None
        self._file = self._socket.makefile("rb")

    def call(self, op: str, **order: Any) -> dict[str, Any]:
        """Send one order and return the agent's answer."""
        try:
            self._socket.sendall(json.dumps({"op": op} | order).encode() + b"\n")
            line = self._file.readline()
        except OSError as error:
            raise WorkError(f"the agent at {self.path} does not answer: {error.strerror or error}") from None
        if not line:
            raise WorkError(f"the agent at {self.path} has gone")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            if answer.get("kind") == "input":
                raise InputError(answer["error"], field=answer.get("field"))
            raise WorkError(answer["error"])
        return answer

    def close(self) -> None:
        """Hang up."""
        self._file.close()
        self._socket.close()

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
