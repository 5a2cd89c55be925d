"""JSON lines over sockets and pipes: a client sends a request (order) `{"op": NAME, ...}` per line and gets an answer
per line. Server: line_server.py.

A failed order is answered by `{"error", "kind", "field", "file"}`, which the client raises again. `kind` is "work" or a
key of `INPUT_ERRORS`.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import Any, Self

from cotenant.core.errors import (
    InputError,
    LostServerError,
    NoHostMemoryError,
    NothingToDoError,
    TakenNameError,
    WorkError,
)

LOG = logging.getLogger(__name__)
Message = dict[str, Any]
# "kind" of an answer -> class of the error that the client raises, subclasses first
INPUT_ERRORS: dict[str, type[InputError]] = {
    "taken": TakenNameError,
    "nothing to do": NothingToDoError,
    "no host memory": NoHostMemoryError,
    "input": InputError,
}


def encode(message: Message) -> bytes:
    """Return a message as a JSON line."""
    return json.dumps(message).encode() + b"\n"


def order_of(line: bytes) -> Message:
    """Parse a client's request (order). Raises InputError if the line is not one."""
    try:
        order = json.loads(line)
    except (ValueError, RecursionError):
        raise InputError("not a JSON object") from None
    if not isinstance(order, dict) or not isinstance(order.get("op"), str):
        raise InputError("an order must be a JSON object with the key op, the name of an operation")
    return order


def failure(error: Exception, server: str = "server") -> Message:
    """Return the answer to a client's request that failed with `error`. An unexpected exception is logged and does not
    end the server.
    """
    if isinstance(error, InputError):
        kind = next(name for name, type_ in INPUT_ERRORS.items() if isinstance(error, type_))
        return {"error": error.message, "field": error.field, "file": error.file, "kind": kind}
    if isinstance(error, WorkError):
        return {"error": str(error), "kind": "work"}
    LOG.error("unexpected error in an order", exc_info=error)
    return {"error": f"the {server} failed on this order: {error}", "kind": "work"}


class LineClient:
    """A client's open connection to a server at `where`. `who` names the server in messages: the agent, the fleet. If
    the server answers with an InputError or WorkError, the client raises it; LostServerError if no answer comes.
    """

    def __init__(self, connection: socket.socket, who: str, where: str) -> None:
        self._socket = connection
        self._file = connection.makefile("rb")
        self._peer = f"the {who} at {where}"

    def call(self, op: str, **order: Any) -> Message:
        """Send one request with the operation `op` to the server, and return its answer."""
        lost: OSError | None = None
        try:
            try:
                self._socket.sendall(encode({"op": op} | order))
            except (BrokenPipeError, ConnectionResetError) as error:
                lost = error  # a server that refused this client has written why before it closed the connection
            line = self._file.readline()
        except OSError as error:
            lost, line = lost or error, b""
        if lost is not None and not line:
            raise LostServerError(f"{self._peer} does not answer: {lost.strerror or lost}") from None
        if not line.endswith(b"\n"):  # the connection ended before the answer was complete
            raise LostServerError(f"{self._peer} has closed the connection without an answer")
        answer: Message = json.loads(line)
        if "error" in answer:
            if (raised := INPUT_ERRORS.get(answer.get("kind", ""))) is not None:
                raise raised(answer["error"], field=answer.get("field"), file=answer.get("file"))
            raise WorkError(answer["error"])
        return answer

    def within(self, timeout_s: float) -> None:
        """Set the time limit for all further answers of the server."""
        self._socket.settimeout(timeout_s)

    def close(self) -> None:
        """Close the connection to the server."""
        self._file.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_pipe(start: Callable[[], Callable[[Message], Message]]) -> None:
    """Answer the requests (orders) on standard input until the input ends: the main loop of a helper process.

    `start` returns the function that answers one request. Standard input and standard output are reserved for this
    protocol: other output goes to standard error, and processes started meanwhile do not inherit the two streams, so
    that the caller notices when this process ends.
    """
    source, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    answer = start()
    for line in source:
        answers.write(encode(answer(json.loads(line))))
        answers.flush()
