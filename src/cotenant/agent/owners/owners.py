"""Tenants owned by an orchestrator: a pod's container or a batch job. The cgroup identifies their processes.

The orchestrator's side (device plugin, prolog) names the pods and jobs that it placed; the kernel tells to which of
them a connecting process belongs. What the process itself sends only selects a container of its own pod.
"""

from __future__ import annotations

from collections.abc import Callable

from cotenant.abi.protocol import Status
from cotenant.agent.ipc.wire import BadMessageError
from cotenant.agent.tenants.places import Owner, Place, place_of
from cotenant.agent.tenants.tenant import Session, Tenant

PATIENCE_S = 8.0  # a process may connect before its pod is announced; a shim waits 10 s for an answer


class NotYetError(Exception):
    """The process belongs to a pod that the orchestrator has not announced yet."""

    def __init__(self, place: Place) -> None:
        self.place = place
        super().__init__(f"{place.kind} {place.id}")


class Owners:
    """Tenants by the pod or job that owns them, and the connections that came before the announcement."""

    def __init__(self, locate: Callable[[int], Place | None] = place_of) -> None:
        self.locate = locate
        self.expected: set[str] = set()  # kinds of orchestrators seen so far: announcements may still arrive
        self._tenants: dict[tuple[str, str], list[Tenant]] = {}
        self._early: list[tuple[tuple[str, str], Session, bytes]] = []

    def add(self, tenant: Tenant, owner: Owner) -> None:
        """Set a tenant's owner."""
        tenant.owner = owner
        self.expected.add(owner.kind)
        self._tenants.setdefault(owner[:2], []).append(tenant)

    def remove(self, tenant: Tenant) -> None:
        """Remove a tenant's owner."""
        assert tenant.owner is not None
        key, tenant.owner = tenant.owner[:2], None
        mine = self._tenants.get(key, [])
        if tenant in mine:
            mine.remove(tenant)
        if not mine:
            self._tenants.pop(key, None)

    def owned(self, kind: str) -> list[Tenant]:
        """Tenants of all pods, or of all jobs."""
        return [tenant for (theirs, _), mine in self._tenants.items() if theirs == kind for tenant in mine]

    def of(self, kind: str, id_: str) -> list[Tenant]:
        """Tenants of one pod or job."""
        return list(self._tenants.get((kind, id_), ()))

    def tenant_of(self, pid: int, token: str) -> Tenant | None:
        """The tenant of a process, by its pod or job; None if that has no tenant and none is expected.

        Raises NotYetError if the process should wait, BadMessageError if several containers are possible.
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

    # -- those that are early --------------------------------------------------------------------------------------

    def wait(self, place: Place, session: Session, hello: bytes) -> None:
        """Keep a HELLO until its pod is announced."""
        self._early = [entry for entry in self._early if not entry[1].closed]
        self._early.append((place[:2], session, hello))

    def arrived(self, kind: str, id_: str) -> list[tuple[Session, bytes]]:
        """Connections that waited for this pod or job, whose HELLO is then processed again."""
        due = [(session, hello) for key, session, hello in self._early if key == (kind, id_) and not session.closed]
        self._early = [entry for entry in self._early if entry[0] != (kind, id_) and not entry[1].closed]
        return due
