"""Ports that a test names before a program listens on them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_ports(count: int = 1) -> Iterator[list[int]]:
    """Ports of the loopback interface that no other program gets by chance while the block lasts. Their sockets are
    bound and do not listen: a program that names one of the ports, with SO_REUSEADDR as servers set it, can listen."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        yield [int(one.getsockname()[1]) for one in held]
