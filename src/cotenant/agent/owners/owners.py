"""Tenants that belong to a container of a pod, or to a batch job. The agent recognizes their processes by the cgroup.

Kubernetes' device plugin, or Slurm's prolog, announces the pods and jobs of this node to the agent. When a process
connects, the agent reads the process's cgroup from the kernel, and so finds its pod or job. The token that the process
sends only selects a container of that pod.
"""

from __future__ import annotations

from collections.abc import Callable

from cotenant.abi.protocol import Status
from cotenant.agent.ipc.wire import BadMessageError
from cotenant.agent.tenants.places import Owner, Place, place_of
from cotenant.agent.tenants.tenant import Session, Tenant

# a process may connect before its pod is announced, and then waits this long; its shim waits 10 s for the answer
PATIENCE_S = 8.0


class NotYetError(Exception):
    """Raised if a process belongs to a pod or job that has not been announced to the agent yet."""

    def __init__(self, place: Place) -> None:
        self.place = place
        super().__init__(f"{place.kind} {place.id}")


class Owners:
    """The tenants of each pod and job, and the processes that connected before their pod or job was announced."""

    def __init__(self, locate: Callable[[int], Place | None] = place_of) -> None:
        self.locate = locate
        # "pod" if pods may be announced, "slurm" if jobs may; a process that connects before its pod or job is
        # announced then waits for the announcement
        self.expected: set[str] = set()
        self._tenants: dict[tuple[str, str], list[Tenant]] = {}
        self._early: list[tuple[tuple[str, str], Session, bytes]] = []

    def add(self, tenant: Tenant, owner: Owner) -> None:
        """Record that a tenant belongs to a pod or job."""
        tenant.owner = owner
        self.expected.add(owner.kind)
        self._tenants.setdefault(owner[:2], []).append(tenant)

    def remove(self, tenant: Tenant) -> None:
        """Record that a tenant does not belong to its pod or job any more."""
        assert tenant.owner is not None
        key, tenant.owner = tenant.owner[:2], None
        mine = self._tenants.get(key, [])
        if tenant in mine:
            mine.remove(tenant)
        if not mine:
            self._tenants.pop(key, None)

    def owned(self, kind: str) -> list[Tenant]:
        """Return the tenants of all pods, or of all jobs."""
        return [tenant for (theirs, _), mine in self._tenants.items() if theirs == kind for tenant in mine]

    def of(self, kind: str, id_: str) -> list[Tenant]:
        """Tenants of one pod or job."""
        return list(self._tenants.get((kind, id_), ()))

    def tenant_of(self, pid: int, token: str) -> Tenant | None:
        """The tenant of a process, found by its pod or job. None if the process belongs to no pod or job, or to one
        that has no tenants and for whose announcement the process need not wait.

        Raises NotYetError if the process must wait until its pod, job or container is announced, BadMessageError if the
        pod has several tenants and it is not known to which container the process belongs.
        """
        place = self.locate(pid)
        if place is None:
            return None
        mine = self._tenants.get((place.kind, place.id), [])
        named = token.startswith(("container:", "container#"))
        if not mine:
            if place.kind in self.expected and (named or not token):
                raise NotYetError(place)
            return None
        if named:
            for tenant in mine:
                if tenant.owner is not None and tenant.owner.token == token:
                    return tenant
            raise NotYetError(place)
        by_id = [t for t in mine if t.owner and place.container_id and t.owner.container_id == place.container_id]
        if by_id or len(mine) == 1:
            return (by_id or mine)[0]
        names = ", ".join(t.owner.container for t in mine if t.owner)
        raise BadMessageError(
            Status.UNKNOWN_TENANT, f"process {pid} is in a pod with shares for {names}, but its container is unknown"
        )

    def in_container(self, pid: int) -> bool:
        """Whether a process is in a pod, where root is not this machine's administrator."""
        place = self.locate(pid)
        return place is not None and place.kind == "pod"

    # -- processes that connect early ------------------------------------------------------------------------------

    def wait(self, place: Place, session: Session, hello: bytes) -> None:
        """Keep the HELLO message of a process until its pod or job is announced."""
        self._early = [entry for entry in self._early if not entry[1].closed]
        self._early.append((place[:2], session, hello))

    def arrived(self, kind: str, id_: str) -> list[tuple[Session, bytes]]:
        """Return the connections that waited for this pod or job, with their HELLO messages."""
        due = [(session, hello) for key, session, hello in self._early if key == (kind, id_) and not session.closed]
        self._early = [entry for entry in self._early if entry[0] != (kind, id_) and not entry[1].closed]
        return due
