"""What a GPU's slices need done to channel groups, as the policy orders it."""

from __future__ import annotations

from typing import NamedTuple


class SetSlice(NamedTuple):
    """All groups of the tenant get this slice."""

    gpu: str
    tenant: str
    slice_us: int


class Stop(NamedTuple):
    """Take the tenant's channels off the GPU, preempting running work."""

    gpu: str
    tenant: str


class Go(NamedTuple):
    """Allow the tenant's channels on the GPU again."""

    gpu: str
    tenant: str


SliceInstruction = SetSlice | Stop | Go
