"""How strongly a promise is kept: what enforces it, and what would enforce it on a machine."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from cotenant.core.errors import InputError


class Promise(enum.StrEnum):
    """What a share of a GPU promises."""

    TIME = "time"
    SMS = "sms"
    MEMORY = "memory"
    BANDWIDTH = "bandwidth"
    FAULTS = "faults"  # a tenant's fault does not end the others


class Strength(enum.StrEnum):
    """What enforces a promise, the strongest first. Only the shim and what is below it are in the tenant's hands."""

    KERNEL = "kernel"  # the operating system, on the tenant's cgroup
    DRIVER = "driver"  # NVIDIA's driver, in the kernel
    HARDWARE = "hardware"  # the GPU, set from outside the tenant
    SERVER = "server"  # a process that the tenant's work passes through, such as an MPS server
    SHIM = "shim"  # a library in the tenant's own process
    NOTHING = "nothing"

    @property
    def rank(self) -> int:
        """0 for the strongest."""
        return list(Strength).index(self)

    def at_least(self, demanded: Strength) -> bool:
        """Whether a promise kept by this is kept as strongly as demanded."""
        return self.rank <= demanded.rank


def strength_named(text: object, **where: Any) -> Strength:
    """A strength that can be demanded. InputError for another word."""
    known = [each.value for each in Strength if each is not Strength.NOTHING]
    if text not in known:
        raise InputError(f"{str(text)[:40]!r} is not one of {', '.join(known)}", **where)
    return Strength(str(text))


@dataclass(frozen=True)
class Prospect:
    """What would keep one promise of a tenant on one GPU of this machine."""

    promise: Promise
    by: Strength
    how: str  # what enforces it, in a few words: "dmem.max of the tenant's cgroup"
    why: str  # one sentence: why this and nothing stronger
    obstacles: tuple[str, ...] = ()  # what stands in the way of something stronger, a sentence each
