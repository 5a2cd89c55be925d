"""A caller of the fleet: one order, one answer, over its unix socket or over loopback with the token."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from cotenant.model.errors import InputError, WorkError


def default_folder() -> Path:
    """Where the fleet of this user lives: $COTENANT_FLEET, else below the state folder."""
    named = os.environ.get("COTENANT_FLEET")
    if named:
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "cotenant" / "fleet"


class FleetClient:
    """One connection. `where`: the fleet's folder, or 127.0.0.1:PORT with the token in $COTENANT_FLEET_TOKEN.

    Raises WorkError when no fleet answers, InputError or WorkError as it answers.
    """

    def __init__(self, where: Path | str, timeout_s: float = 120.0) -> None:
        self.where = str(where)
        host, _, port = self.where.rpartition(":")
        try:
            if host in ("127.0.0.1", "localhost") and port.isdigit():
                self._socket = socket.create_connection(("127.0.0.1", int(port)), timeout_s)
                self._socket.sendall(os.environ.get("COTENANT_FLEET_TOKEN", "").encode() + b"\n")
            else:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
                self._socket.settimeout(timeout_s)
                self._socket.connect(str(Path(where) / "fleet.sock"))
        except OSError as error:
            raise WorkError(
                f"no fleet answers at {self.where} ({(error.strerror or str(error)).lower()}): start one with cotenant "
                "fleet up, or name its folder with --fleet"
            ) from None
        self._file = self._socket.makefile("rb")

    def call(self, op: str, **order: Any) -> dict[str, Any]:
        """Send one order and return the answer."""
        try:
            self._socket.sendall(json.dumps({"op": op} | order).encode() + b"\n")
            line = self._file.readline()
        except OSError as error:
            raise WorkError(f"the fleet at {self.where} does not answer: {error.strerror or error}") from None
        if not line:
            raise WorkError(f"the fleet at {self.where} has gone")
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

    def __enter__(self) -> FleetClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
