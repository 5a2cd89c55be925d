"""The pod or batch job of a process, from its cgroup."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

MAX_TOKEN = 63  # the size of the field in HELLO
_HEX = "[0-9a-f]"
_UID = f"{_HEX}{{8}}(?:[-_]{_HEX}{{4}}){{3}}[-_]{_HEX}{{12}}|{_HEX}{{32}}"
# cgroupfs: kubepods/burstable/podUID/ID; systemd: kubepods-burstable-podUID_.slice/cri-containerd-ID.scope
_POD = re.compile(rf"/(?:[a-z0-9-]*kubepods[a-z-]*-)?pod({_UID})(?:\.slice)?(?:/(?:[a-z-]+-)?({_HEX}{{64}})|/|$)")
# cgroup 1: /slurm/uid_1000/job_7/step_0; cgroup 2: /system.slice/slurmstepd.scope/job_7/step_0
_SLURM = re.compile(r"/(?:slurm[^/]*/uid_\d+|[^/]*slurmstepd\.scope)/job_(\d+)(?:/|$)")


class Place(NamedTuple):
    """The pod or job of a process: kind (`pod` or `slurm`), pod UID or job number, and the container's ID."""

    kind: str
    id: str
    container_id: str = ""


class Owner(NamedTuple):
    """The pod or job that owns a tenant. `container`: its name within the pod; `container_id`: the runtime's, once
    known.
    """

    kind: str
    id: str
    container: str = ""
    container_id: str = ""

    @property
    def token(self) -> str:
        """COTENANT_TOKEN of the processes of this container."""
        return container_token(self.container) if self.container else ""


def container_token(name: str) -> str:
    """COTENANT_TOKEN of a container: its name, which is not secret. Long names are hashed to fit."""
    plain = f"container:{name}"
    return plain if len(plain) <= MAX_TOKEN else f"container#{hashlib.sha256(name.encode()).hexdigest()[:40]}"


def place_in(text: str) -> Place | None:
    """The pod or job in the contents of /proc/PID/cgroup. The outermost match counts, since processes may name
    subgroups.
    """
    for line in text.splitlines():
        path = line.split(":", 2)[-1]
        if match := _POD.search(path):
            return Place("pod", match.group(1).replace("_", "-"), match.group(2) or "")
        if match := _SLURM.search(path):
            return Place("slurm", match.group(1))
    return None


def place_of(pid: int, proc: Path = Path("/proc")) -> Place | None:
    """The pod or job of a process; None if there is none, or if the process has ended."""
    try:
        return place_in((proc / str(pid) / "cgroup").read_text(errors="replace"))
    except OSError:
        return None
