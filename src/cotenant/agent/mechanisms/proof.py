"""Which clients the MPS servers have, and which they should have.

The agent compares the two to check that each tenant has its share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Place(NamedTuple):
    """The MPS server that limits a client, and the client's namespace if the server has namespaces."""

    server: str
    namespace: str = ""

    def __str__(self) -> str:
        return f"namespace {self.namespace} of server {self.server}" if self.namespace else f"server {self.server}"


class Client(NamedTuple):
    """A process that is a client of an MPS server."""

    pid: int
    place: Place


@dataclass(frozen=True)
class Look:
    """The clients of a mechanism's MPS servers. `put_right`: tenant -> sentence about limits that another program had
    changed and that were restored.
    """

    clients: tuple[Client, ...]
    places: Mapping[str, Place]  # tenant -> the MPS server and namespace of which its processes must be clients
    put_right: Mapping[str, str] = field(default_factory=dict)


class Sms(NamedTuple):
    """Numbers of SMs of one GPU: reserved for a tenant, and the most that the tenant's programs may use (0: unknown).
    """

    reserved: int
    at_most: int
