"""The instructions of the policy of turns to the agent, as plain data. A *turn* is a time slice on a GPU that the agent
grants to a tenant, the *holder*; `epoch` is the number of the turn.
"""

from __future__ import annotations

from typing import NamedTuple


class Grant(NamedTuple):
    """The tenant may launch work until `deadline_ns`."""

    gpu: str
    tenant: str
    epoch: int
    deadline_ns: int


class Move(NamedTuple):
    """The holder's deadline changes to `deadline_ns`: later if no other tenant waits, earlier if one does."""

    gpu: str
    tenant: str
    epoch: int
    deadline_ns: int


class Revoke(NamedTuple):
    """The holder must stop launching now, and release the GPU once its work in flight has ended."""

    gpu: str
    tenant: str
    epoch: int
    reason: str


class Claim(NamedTuple):
    """The next tenant is a gang, which needs several GPUs at the same time: they must be collected (NodeTurns does
    that).
    """

    gpu: str
    tenant: str


class Stuck(NamedTuple):
    """The holder's work did not end in time. Other tenants run concurrently with it until it has ended."""

    gpu: str
    tenant: str
    epoch: int
    held_ns: int


class Ended(NamedTuple):
    """A turn has ended; the trace records it. `reason`: released, idle, expired, revoked, gone, stuck, undrained."""

    gpu: str
    tenant: str
    epoch: int
    start_ns: int
    end_ns: int
    quota_ns: int
    waited_ns: int
    reason: str


Instruction = Grant | Move | Revoke | Claim | Stuck | Ended
