"""Where a server listens. Addresses are taken before anything is loaded, so that one in use is found at once; they
refuse connections until the server is ready."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping

from cotenant.core.errors import WorkError

Address = tuple[str, int]


def take(addresses: Mapping[str, Address | None]) -> dict[str, list[socket.socket]]:
    """A bound socket for each way to reach each door; a port of 0 is any that is free. WorkError names an address that
    cannot be had."""
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
    """Bind every address that a name has, all with one port."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, where in dict.fromkeys(found):
        try:
            door = socket.socket(family, kind, protocol)
        except OSError:  # a kernel without IPv6 knows the name's IPv4 address
            if len(found) > 1:
                continue
            raise
        taken.append(door)
        door.setblocking(False)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a server that ended are no reason
        if family == socket.AF_INET6:
            door.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        own = taken[0].getsockname()[1] if len(taken) > 1 else port
        try:
            door.bind((where[0], own, *where[2:]))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL or len(found) == 1:
                raise
            taken.pop().close()  # a name may have an address that this machine has switched off
    if not taken:
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))


def let_go(taken: Mapping[str, list[socket.socket]]) -> None:
    """Give addresses back that no server listens on."""
    for sockets in taken.values():
        for door in sockets:
            door.close()


def _why(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "there is no such host"
    return (error.strerror or str(error)).lower()
