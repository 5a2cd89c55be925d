"""Clients of a mechanism's server, as the server lists them; used to prove that tenants have the share they were
given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Place(NamedTuple):
    """Where a client's limits come from: a server, and if it has namespaces, one of them."""

    server: str
    namespace: str = ""

    def __str__(self) -> str:
        return f"namespace {self.namespace} of server {self.server}" if self.namespace else f"server {self.server}"


class Client(NamedTuple):
    """A process served by a server."""

    pid: int
    place: Place


@dataclass(frozen=True)
class Look:
    """The state of a mechanism's servers. `put_right`: tenant -> which part of its share was changed and restored."""

    clients: tuple[Client, ...]
    places: Mapping[str, Place]  # tenant -> where its processes belong
    put_right: Mapping[str, str] = field(default_factory=dict)


class Sms(NamedTuple):
    """SMs of one GPU: the number reserved for a tenant, and the most that its programs may use (0: unknown)."""

    reserved: int
    at_most: int
