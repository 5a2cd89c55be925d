"""What a mechanism's server says of its clients, for the proof that tenants have the share they were given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Place(NamedTuple):
    """Where a client's limits come from: a server, and a namespace of it where there are some."""

    server: str
    namespace: str = ""

    def __str__(self) -> str:
        return f"namespace {self.namespace} of server {self.server}" if self.namespace else f"server {self.server}"


class Client(NamedTuple):
    """A process that a server serves."""

    pid: int
    place: Place


@dataclass(frozen=True)
class Look:
    """One look at a mechanism's servers. `put_right`: tenant -> what of its share was changed, and set again."""

    clients: tuple[Client, ...]
    places: Mapping[str, Place]  # tenant -> where its processes belong
    put_right: Mapping[str, str] = field(default_factory=dict)


class Sms(NamedTuple):
    """SMs of one GPU: what a tenant has to itself, and the most that its programs may see (0: not known)."""

    reserved: int
    at_most: int
