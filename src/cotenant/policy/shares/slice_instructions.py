"""Instructions of the policy of hardware time slices, which the agent applies to the channel groups of a tenant's
processes.
"""

from __future__ import annotations

from typing import NamedTuple


class SetSlice(NamedTuple):
    """Instruction: give all channel groups of the tenant this time slice."""

    gpu: str
    tenant: str
    slice_us: int


class Stop(NamedTuple):
    """Instruction: take the tenant's channels off the GPU, which preempts running work."""

    gpu: str
    tenant: str


class Go(NamedTuple):
    """Instruction: let the tenant's channels run on the GPU again."""

    gpu: str
    tenant: str


SliceInstruction = SetSlice | Stop | Go
