"""Listening sockets of a server. Addresses are bound before anything is loaded, so that conflicts are found at once;
until the server is ready, connections are refused.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence

from cotenant.core.errors import WorkError

Address = tuple[str, int]
BACKLOG = 4096
UNGUARDED = (
    "can be reached from other machines without a token: anyone may send requests (listen.tokens)"
)


def take(addresses: Mapping[str, Address | None]) -> dict[str, list[socket.socket]]:
    """Bind the sockets of each endpoint; port 0 chooses a free port. Raises WorkError that names the address which
    cannot be bound.
    """
    taken: dict[str, list[socket.socket]] = {}
    try:
        for door, address in addresses.items():
            if address is not None:
                taken[door] = []
                _take(*address, taken[door])
    except OSError as error:
        let_go(taken)
        host, port = addresses[door] or ("", 0)
        raise WorkError(f"cannot listen on {host}:{port}: {_why(error)}") from None
    return taken


def _take(host: str, port: int, taken: list[socket.socket]) -> None:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, where in dict.fromkeys(found):
        try:
            door = socket.socket(family, kind, protocol)
        except OSError:  # if the kernel has no IPv6, only the IPv4 address of the name is bound
            if len(found) > 1:
                continue
            raise
        taken.append(door)
        door.setblocking(False)
        # a new server can then bind the address while connections of a server that has ended are in TIME_WAIT
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            door.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        own = taken[0].getsockname()[1] if len(taken) > 1 else port
        try:
            door.bind((where[0], own, *where[2:]))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL or len(found) == 1:
                raise
            # the host name resolves to several addresses, and this address may be disabled on this machine
            taken.pop().close()
    if not taken:
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))


async def listen(
    sockets: Sequence[socket.socket], host: str, protocol: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None
) -> tuple[str, list[asyncio.Server]]:
    """Listen on the sockets of an endpoint. Returns the endpoint's HOST:PORT and the listeners. Raises WorkError if
    another server listens on the address.
    """
    loop, port = asyncio.get_running_loop(), sockets[0].getsockname()[1]
    listeners = []
    for door in sockets:
        try:
            # `listen` is called here and not left to create_server, because with uvloop that would not fail if another
            # server has begun to listen on the address since the socket was bound
            door.listen(BACKLOG)
            listeners.append(await loop.create_server(protocol, sock=door, ssl=tls, backlog=BACKLOG))
        except OSError as error:
            raise WorkError(f"cannot listen on {host}:{port}: {_why(error)}") from None
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}", listeners


def let_go(taken: Mapping[str, list[socket.socket]]) -> None:
    """Close the bound sockets on which no server listens."""
    for sockets in taken.values():
        for door in sockets:
            door.close()


def _why(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "there is no such host"
    return (error.strerror or str(error)).lower()
