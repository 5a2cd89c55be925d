"""How strongly the properties of a tenant's share (its time, SMs, memory ...) are enforced on a machine, and by
what."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from cotenant.core.errors import InputError

# the state of a tenant while a part of its share is not enforced, and the name of the event that reports it
NOT_ENFORCED = "ShareNotEnforced"


class Promise(enum.StrEnum):
    """A property that a share of a GPU guarantees to its tenant."""

    TIME = "time"
    SMS = "sms"
    MEMORY = "memory"
    BANDWIDTH = "bandwidth"
    FAULTS = "faults"  # property of a share: a fault of one tenant does not end the other tenants


class Strength(enum.StrEnum):
    """What enforces a guaranteed property, strongest first. A tenant can circumvent SHIM, but not what comes before it.
    """

    KERNEL = "kernel"  # enforcement by the operating system's kernel, through the tenant's cgroup
    DRIVER = "driver"  # enforcement by NVIDIA's kernel driver
    HARDWARE = "hardware"  # enforcement by the GPU, configured from outside the tenant
    SERVER = "server"  # enforcement by a process through which the tenant's work passes, such as an MPS server
    SHIM = "shim"  # enforcement by a library in the tenant's own process
    NOTHING = "nothing"

    @property
    def rank(self) -> int:
        """Return the rank of what enforces the property; 0 is the strongest."""
        return list(Strength).index(self)

    def at_least(self, demanded: Strength) -> bool:
        """Whether this enforcement is at least as strong as the demanded one."""
        return self.rank <= demanded.rank


DEMANDABLE = tuple(each for each in Strength if each is not Strength.NOTHING)


def strength_named(text: object, **where: Any) -> Strength:
    """Return the Strength that a user demands by this word. Raises InputError for other words."""
    if text not in DEMANDABLE:
        raise InputError(f"{str(text)[:40]!r} is not one of {', '.join(DEMANDABLE)}", **where)
    return Strength(str(text))


@dataclass(frozen=True)
class Prospect:
    """What enforces one property of a tenant's share on one GPU of this machine."""

    promise: Promise
    by: Strength
    how: str  # what enforces the property, in a few words, such as "dmem.max of the tenant's cgroup"
    why: str  # why it is not enforced more strongly, as a sentence
    # what would have to change for a stronger enforcement, one sentence for each obstacle
    obstacles: tuple[str, ...] = ()
