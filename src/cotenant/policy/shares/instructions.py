"""The instructions of the policy of turns to the agent, as plain data. A *turn* is a time slice on a GPU that the agent
grants to a tenant, the *holder*; `epoch` is the number of the turn.
"""

from __future__ import annotations

from typing import NamedTuple


class Grant(NamedTuple):
    """Instruction: the tenant may launch work on the GPU until `deadline_ns`."""

    gpu: str
    tenant: str
    epoch: int
    deadline_ns: int


class Move(NamedTuple):
    """Instruction: the deadline of the tenant that holds the GPU changes to `deadline_ns`, later if no other tenant
    waits, earlier if one does.
    """

    gpu: str
    tenant: str
    epoch: int
    deadline_ns: int


class Revoke(NamedTuple):
    """Instruction: the tenant that holds the GPU must stop launching now, and release the GPU once its work in flight
    has ended.
    """

    gpu: str
    tenant: str
    epoch: int
    reason: str


class Claim(NamedTuple):
    """Instruction to NodeTurns: the next tenant is a gang, which needs several GPUs at the same time, so NodeTurns must
    wait until all of them are free and then grant them together.
    """

    gpu: str
    tenant: str


class Stuck(NamedTuple):
    """Report that the work of the tenant that held the GPU did not end in time. Other tenants run concurrently with
    this work until it has ended.
    """

    gpu: str
    tenant: str
    epoch: int
    held_ns: int


class Ended(NamedTuple):
    """Report that a tenant's turn on the GPU has ended; the trace records it. `reason`:

    - released, idle, exit: the holder gave the turn back: at its deadline, for lack of work, or when it exited
    - limit: the policy ended the turn because the tenant reached its limit
    - contended: the policy ended the turn early because a tenant that precedes the holder waited
    - preempted: the policy ended the turn at once because a tenant of higher priority waited
    - gang, suspended: the tenant lost its turn on another of its GPUs, or was suspended
    - expired: the turn was revoked, since the holder still had the GPU some time after the deadline
    - stuck, undrained: the work had not ended some time after the turn was revoked; undrained is for gangs
    - gone: the tenant or its process ended, or no process could use the turn
    """

    gpu: str
    tenant: str
    epoch: int
    start_ns: int
    end_ns: int
    quota_ns: int
    waited_ns: int
    reason: str


Instruction = Grant | Move | Revoke | Claim | Stuck | Ended
