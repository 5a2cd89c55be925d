"""Finds the control group for a tenant's memory limit: the launcher's group, if no other process is in it, or a new
group with the same parent.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Collection
from pathlib import Path

from cotenant.agent.tenants.places import Owner
from cotenant.core.cgroups import Cgroups
from cotenant.devices.base import Gpu
from cotenant.devices.group_limits import OWN
from cotenant.devices.registry import device_of

# names of the control groups of containers and jobs; their processes may create subgroups but cannot leave the group
_PLACE = re.compile(r"(?:^|[:-])[0-9a-f]{64}(?:\.scope)?$|^job_\d+$")
# files of a group that have bounds on what its processes may use
BOUNDS = (
    "memory.max", "memory.high", "memory.swap.max", "pids.max", "cpu.max", "cpuset.cpus", "cpuset.mems", "io.max",
    "dmem.max",
)  # fmt: skip
NAMESPACES = ("mnt", "pid", "cgroup")


class NoGroupError(Exception):
    """A tenant cannot have a control group of its own; the message says why."""


def mark_of(folder: Path) -> str:
    """Prefix of the names of control groups that the agent with this folder creates."""
    return f"{OWN}{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]}-"


def hierarchy_of(gpus: tuple[Gpu, ...]) -> Cgroups:
    """The tree of control groups in which the driver of these GPUs limits memory. Raises OSError if there is none."""
    hierarchy = device_of(gpus[0]).cgroups()
    if hierarchy is None:
        raise OSError(f"the driver of GPU {gpus[0].index} has no limits for control groups")
    return hierarchy


def place_group(group: Path, owner: Owner | None = None) -> Path | None:
    """The control group of the container or job to which `group` belongs; None outside containers and jobs. `owner`:
    the pod or job, if it is known.
    """
    # the outermost group that matches counts, since processes in a container can create groups with any name below it
    above = [*reversed(group.parents), group]
    if owner is not None:
        # a node may be a container itself, so that a pod's container is not the outermost one
        names = (owner.id, owner.id.replace("-", "_"))
        first = next((i for i, each in enumerate(above) if any(name in each.name for name in names)), 0)
        above = above[first:]
    return next((each for each in above if _PLACE.search(each.name)), None)


def own_group(hierarchy: Cgroups, pid: int, taken: Collection[Path]) -> Path | None:
    """The control group that a launcher has for itself: that of its container, or one without other processes. None if
    other processes are in its group. Raises NoGroupError if another tenant uses the container's group.
    """
    group = hierarchy.of(pid)
    if group == hierarchy.root:
        return None
    inside = in_container(pid)
    found = (place_group(group) or group) if inside else group
    alone = set(hierarchy.processes(group)) == {pid} and found not in taken
    if inside and found in taken:
        raise NoGroupError("another tenant already uses the control group of the launcher's container")
    return found if inside or alone else None


def new_group(hierarchy: Cgroups, pid: int, mark: str, tenant: str) -> Path:
    """Path of a new control group for a tenant, beside the launcher's group, so that the limits of their common parent
    still apply. Raises NoGroupError if the launcher's group has limits, which the launcher would escape.
    """
    group = hierarchy.of(pid)
    for name in BOUNDS if group != hierarchy.root else ():
        if name == "dmem.max" and group.name.startswith(mark):
            continue  # a tenant's program starts another tenant, which was admitted with a limit of its own
        with contextlib.suppress(OSError):
            if _bounds(name, hierarchy.read(group, name)):
                raise NoGroupError(
                    f"the launcher's control group has a limit ({name}), which the tenant would escape in a control "
                    "group of its own"
                )
    parent = group if group == hierarchy.root else group.parent
    stem = mark + re.sub(r"[^A-Za-z0-9_.-]", "_", tenant)[:100]
    return next(path for i in range(1, 1 << 16) if not (path := parent / f"{stem}-{i}").exists())


def _bounds(name: str, text: str) -> bool:
    """Return whether `text`, the contents of a control group's file `name` (one of BOUNDS), sets a limit."""
    if name == "cpu.max":  # the quota comes first in cpu.max, and the period follows
        return text.split()[:1] != ["max"]
    # io.max and dmem.max have a line for each device, which begins with the device's name
    if name in ("io.max", "dmem.max"):
        return any(word.rpartition("=")[2] != "max" for line in text.splitlines() for word in line.split()[1:])
    return text.strip() not in ("max", "")


def in_container(pid: int) -> bool:
    """Whether a process runs in a container. Then it must not be moved, because it would escape the container's limits.
    """
    try:
        return any(os.readlink(f"/proc/{pid}/ns/{k}") != os.readlink(f"/proc/self/ns/{k}") for k in NAMESPACES)
    except OSError:
        return True
