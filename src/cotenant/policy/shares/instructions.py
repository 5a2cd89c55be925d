"""Instructions of the token broker to its driver: plain data, one type per instruction."""

from __future__ import annotations

from typing import NamedTuple


class Grant(NamedTuple):
    """The tenant may launch until `deadline_ns`."""

    gpu: str
    tenant: str
    epoch: int
    deadline_ns: int


class Move(NamedTuple):
    """The holder's deadline is now `deadline_ns` (later: no tenant waits; earlier: one does)."""

    gpu: str
    tenant: str
    epoch: int
    deadline_ns: int


class Revoke(NamedTuple):
    """The holder must stop launching now and release the GPU once its work in flight has ended."""

    gpu: str
    tenant: str
    epoch: int
    reason: str


class Claim(NamedTuple):
    """The next in line is a gang, whose GPUs must be gathered (handled by NodeTurns)."""

    gpu: str
    tenant: str


class Stuck(NamedTuple):
    """The holder did not drain in time; other tenants run concurrently until it does."""

    gpu: str
    tenant: str
    epoch: int
    held_ns: int


class Ended(NamedTuple):
    """A turn has ended, as recorded in the trace. `reason`: released, idle, expired, revoked, gone, stuck."""

    gpu: str
    tenant: str
    epoch: int
    start_ns: int
    end_ns: int
    quota_ns: int
    waited_ns: int
    reason: str


Instruction = Grant | Move | Revoke | Claim | Stuck | Ended
