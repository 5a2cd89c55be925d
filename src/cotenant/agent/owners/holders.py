"""Tenants that an orchestrator holds open: a pod's container, a batch job. Its processes are known by their cgroup.

The orchestrator's side (the device plugin, a prolog) tells the agent whom it has placed; the kernel says to which pod
or job a connecting process belongs. What the process says of itself decides no more than which container of its own pod
it is.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cotenant.abi.protocol import Status
from cotenant.agent.ipc.wire import BadMessageError

if TYPE_CHECKING:
    from cotenant.agent.ipc.session import Session
    from cotenant.agent.tenants.registry import Tenant

PATIENCE_S = 8.0  # a process may be faster than the news of its pod; a shim waits 10 s for an answer
MAX_TOKEN = 63  # what HELLO has room for
_HEX = "[0-9a-f]"
_UID = f"{_HEX}{{8}}(?:[-_]{_HEX}{{4}}){{3}}[-_]{_HEX}{{12}}|{_HEX}{{32}}"
# cgroupfs: kubepods/burstable/podUID/ID; systemd: kubepods-burstable-podUID_.slice/cri-containerd-ID.scope
_POD = re.compile(rf"/(?:[a-z0-9-]*kubepods[a-z-]*-)?pod({_UID})(?:\.slice)?(?:/(?:[a-z-]+-)?({_HEX}{{64}})|/|$)")
# cgroup 1: /slurm/uid_1000/job_7/step_0; cgroup 2: /system.slice/slurmstepd.scope/job_7/step_0
_SLURM = re.compile(r"/(?:slurm[^/]*/uid_\d+|[^/]*slurmstepd\.scope)/job_(\d+)(?:/|$)")


class Place(NamedTuple):
    """Where the kernel says a process runs: `pod` and its UID, or `slurm` and its job number; the container's ID."""

    kind: str
    id: str
    container_id: str = ""


class Holder(NamedTuple):
    """Who holds a tenant open. `container`: its name within the pod; `container_id`: the runtime's, once known."""

    kind: str
    id: str
    container: str = ""
    container_id: str = ""

    @property
    def token(self) -> str:
        """What processes of this container say they are, as COTENANT_TOKEN."""
        return container_token(self.container) if self.container else ""


class NotYetError(Exception):
    """The process belongs to a pod of which the orchestrator has not told the agent yet."""

    def __init__(self, place: Place) -> None:
        self.place = place
        super().__init__(f"{place.kind} {place.id}")


def container_token(name: str) -> str:
    """COTENANT_TOKEN of a container: a name, no secret. Long names are hashed to fit."""
    plain = f"container:{name}"
    return plain if len(plain) <= MAX_TOKEN else f"container#{hashlib.sha256(name.encode()).hexdigest()[:40]}"


def place_in(text: str) -> Place | None:
    """The pod or job in the contents of /proc/PID/cgroup. The outermost counts: below it a process may name groups."""
    for line in text.splitlines():
        path = line.split(":", 2)[-1]
        if match := _POD.search(path):
            return Place("pod", match.group(1).replace("_", "-"), match.group(2) or "")
        if match := _SLURM.search(path):
            return Place("slurm", match.group(1))
    return None


def place_of(pid: int, proc: Path = Path("/proc")) -> Place | None:
    """The pod or job that a process runs in; None outside, or when it has gone."""
    try:
        return place_in((proc / str(pid) / "cgroup").read_text(errors="replace"))
    except OSError:
        return None


class Holders:
    """Held tenants by pod or job, and the connections that are early."""

    def __init__(self, locate: Callable[[int], Place | None] = place_of) -> None:
        self.locate = locate
        self.expected: set[str] = set()  # kinds of orchestrators that have spoken: their news may be under way
        self._tenants: dict[tuple[str, str], list[Tenant]] = {}
        self._early: list[tuple[tuple[str, str], Session, bytes]] = []

    def add(self, tenant: Tenant) -> None:
        """A tenant is held from now on."""
        assert tenant.holder is not None
        self.expected.add(tenant.holder.kind)
        self._tenants.setdefault(tenant.holder[:2], []).append(tenant)

    def remove(self, tenant: Tenant) -> None:
        """A tenant is held no more."""
        assert tenant.holder is not None
        key = tenant.holder[:2]
        mine = self._tenants.get(key, [])
        if tenant in mine:
            mine.remove(tenant)
        if not mine:
            self._tenants.pop(key, None)

    def of(self, kind: str, id_: str) -> list[Tenant]:
        """Tenants of one pod or job."""
        return list(self._tenants.get((kind, id_), ()))

    def tenant_of(self, pid: int, token: str) -> Tenant | None:
        """The tenant of a process by its place; None when its place has none and none is expected.

        Raises NotYetError when it should wait, BadMessageError when several containers could be meant.
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
                if tenant.holder is not None and tenant.holder.token == token:
                    return tenant
            raise NotYetError(place)
        by_id = [t for t in mine if t.holder and place.container_id and t.holder.container_id == place.container_id]
        if by_id or len(mine) == 1:
            return (by_id or mine)[0]
        names = ", ".join(t.holder.container for t in mine if t.holder)
        raise BadMessageError(
            Status.UNKNOWN_TENANT, f"process {pid} is in a pod with shares for {names}, and which it is is not known"
        )

    def in_container(self, pid: int) -> bool:
        """Whether a process is in a pod: its root is not this machine's administrator."""
        place = self.locate(pid)
        return place is not None and place.kind == "pod"

    # -- those that are early --------------------------------------------------------------------------------------

    def wait(self, place: Place, session: Session, hello: bytes) -> None:
        """Keep a HELLO until its pod is known."""
        self._early = [entry for entry in self._early if not entry[1].closed]
        self._early.append((place[:2], session, hello))

    def arrived(self, kind: str, id_: str) -> list[tuple[Session, bytes]]:
        """Connections that waited for this pod or job; they are asked again."""
        due = [(session, hello) for key, session, hello in self._early if key == (kind, id_) and not session.closed]
        self._early = [entry for entry in self._early if entry[0] != (kind, id_) and not entry[1].closed]
        return due
