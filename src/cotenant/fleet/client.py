"""Client of the fleet: orders and answers over its unix socket, or over loopback with a token."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from cotenant.core.errors import WorkError
from cotenant.core.folders import STORE_URL
from cotenant.core.lines import LineClient


class FleetClient(LineClient):
    """One connection to a fleet's controller. `where`: the fleet's folder, or 127.0.0.1:PORT with the token in
    $COTENANT_FLEET_TOKEN. Raises WorkError if no fleet answers, and any InputError or WorkError that the controller
    answers with.
    """

    def __init__(self, where: Path | str, timeout_s: float = 120.0) -> None:
        self.where = str(where)
        host, _, port = self.where.rpartition(":")
        try:
            if host in ("127.0.0.1", "localhost") and port.isdigit():
                connection = socket.create_connection(("127.0.0.1", int(port)), timeout_s)
                connection.sendall(os.environ.get("COTENANT_FLEET_TOKEN", "").encode() + b"\n")
            else:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
                connection.settimeout(timeout_s)
                connection.connect(str(Path(where) / "fleet.sock"))
        except OSError as error:
            todo = "start one with cotenant fleet up, or name its folder with --fleet"
            if Path(where, STORE_URL).exists():
                todo = (
                    "the fleet's controller may be on another machine: run this command there, or start a controller "
                    "here"
                )
            raise WorkError(
                f"no fleet answers at {self.where} ({(error.strerror or str(error)).lower()}): {todo}"
            ) from None
        super().__init__(connection, "fleet", self.where)
