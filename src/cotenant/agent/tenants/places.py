"""Finds the pod or batch job to which a process belongs, by its cgroup."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

MAX_TOKEN = 63  # longest token that fits into the message HELLO
_HEX = "[0-9a-f]"
_UID = f"{_HEX}{{8}}(?:[-_]{_HEX}{{4}}){{3}}[-_]{_HEX}{{12}}|{_HEX}{{32}}"
# cgroupfs: kubepods/burstable/podUID/ID; systemd: kubepods-burstable-podUID_.slice/cri-containerd-ID.scope
_POD = re.compile(rf"/(?:[a-z0-9-]*kubepods[a-z-]*-)?pod({_UID})(?:\.slice)?(?:/(?:[a-z-]+-)?({_HEX}{{64}})|/|$)")
# cgroup 1: /slurm/uid_1000/job_7/step_0; cgroup 2: /system.slice/slurmstepd.scope/job_7/step_0
_SLURM = re.compile(r"/(?:slurm[^/]*/uid_\d+|[^/]*slurmstepd\.scope)/job_(\d+)(?:/|$)")


class Place(NamedTuple):
    """The pod or job of a process. `kind`: `pod` or `slurm`; `id`: UID of the pod or number of the job; `container_id`:
    ID of the pod's container.
    """

    kind: str
    id: str
    container_id: str = ""


class Owner(NamedTuple):
    """The pod or job to which a tenant belongs. `container`: the container's name in the pod; `container_id`: its ID in
    the container runtime, empty until it is known.
    """

    kind: str
    id: str
    container: str = ""
    container_id: str = ""

    @property
    def token(self) -> str:
        """Value of COTENANT_TOKEN for the processes of this container."""
        return container_token(self.container) if self.container else ""


def container_token(name: str) -> str:
    """Value of COTENANT_TOKEN for the processes of a container: the container's name, or a hash of a long name. The
    value is not secret.
    """
    plain = f"container:{name}"
    return plain if len(plain) <= MAX_TOKEN else f"container#{hashlib.sha256(name.encode()).hexdigest()[:40]}"


def place_in(text: str) -> Place | None:
    """Find the pod or job in the contents of /proc/PID/cgroup. The outermost group that matches counts, since processes
    in a pod can create groups with any name below it.
    """
    for line in text.splitlines():
        path = line.split(":", 2)[-1]
        if match := _POD.search(path):
            return Place("pod", match.group(1).replace("_", "-"), match.group(2) or "")
        if match := _SLURM.search(path):
            return Place("slurm", match.group(1))
    return None


def place_of(pid: int, proc: Path = Path("/proc")) -> Place | None:
    """The pod or job of a process; None if the process is in none or has ended."""
    try:
        return place_in((proc / str(pid) / "cgroup").read_text(errors="replace"))
    except OSError:
        return None
