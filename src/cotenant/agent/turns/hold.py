"""The present turn of a GPU as the broker keeps it, and what the broker needs to know about tenants' memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from cotenant.agent.tenants.tenant import Session, Tenant

ENDLESS = 0  # in place of the number of a turn: a turn without end
# why a tenant is suspended: it is parked or being parked; its memory could not be restored, which is tried again later;
# or others need space, and it is not to run until they have it
PARKED, RETRY, SPACE = "parked", "retry", "space"


class PausedTurn(NamedTuple):
    """A granted turn that waits for its tenant's memory. `Broker.resume_turn` begins it, `Broker.fail_turn` ends it."""

    tenant: Tenant
    gpu: str
    epoch: int


class Residents(Protocol):
    """Interface that tells whether tenants' memory is on their GPUs."""

    def ready(self, tenant: Tenant, gpu: str) -> bool:
        """Whether all memory of the tenant is on the GPU, so that its turn may begin."""

    def patience_ns(self, tenant: Tenant, gpu: str) -> int:
        """How long in ns an idle tenant keeps its turn, as the cost of swapping suggests."""


class Suspended:
    """Names of the tenants that get no turns, each for one or several reasons."""

    def __init__(self) -> None:
        self._reasons: dict[str, set[str]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._reasons

    def add(self, name: str, why: str) -> None:
        """Suspend a tenant for this reason, too."""
        self._reasons.setdefault(name, set()).add(why)

    def remove(self, name: str, why: str) -> bool:
        """Suspend a tenant no more for this reason. Returns whether there is no other reason."""
        reasons = self._reasons.get(name, set())
        reasons.discard(why)
        if not reasons:
            self._reasons.pop(name, None)
        return not reasons

    def forget(self, name: str) -> None:
        """Remove a tenant that has left."""
        self._reasons.pop(name, None)


@dataclass(eq=False)
class Hold:
    """A turn of a tenant on a GPU, as granted to the tenant's processes."""

    tenant: Tenant
    epoch: int
    deadline_ns: int
    members: dict[Session, int] = field(default_factory=dict)  # process -> index of the GPU's slot on its shared page
    drained_ns: int = 0
    reason: str = "released"
    contended: bool | None = None
