"""Finds the control group for a tenant's memory limit: the launcher's group, if no other process is in it, or a new
group with the same parent.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection
from pathlib import Path

from cotenant.devices.cgroups import Hierarchy

# names of the control groups of containers and jobs; their processes may create subgroups but cannot leave the group
_PLACE = re.compile(r"(?:^|[:-])[0-9a-f]{64}(?:\.scope)?$|^job_\d+$")
BOUNDS = ("memory.max", "memory.high", "pids.max", "cpu.max")
NAMESPACES = ("mnt", "pid", "cgroup")


class NoGroupError(Exception):
    """A tenant cannot have a control group of its own; the message says why."""


def mark_of(folder: Path) -> str:
    """Prefix of the names of control groups that the agent with this folder creates."""
    return f"cotenant-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]}-"


def place_group(group: Path) -> Path | None:
    """The control group of the container or job to which `group` belongs; None outside containers and jobs."""
    for each in (group, *group.parents):
        if _PLACE.search(each.name):
            return each
    return None


def own_group(hierarchy: Hierarchy, pid: int, taken: Collection[Path]) -> Path | None:
    """The control group that a launcher has for itself: that of its container, or one without other processes. None if
    other processes are in its group. Raises NoGroupError if another tenant uses the container's group.
    """
    group = hierarchy.of(pid)
    if group == hierarchy.root:
        return None
    inside = _in_container(pid)
    found = (place_group(group) or group) if inside else group
    alone = set(hierarchy.processes(group)) == {pid} and found not in taken
    if inside and found in taken:
        raise NoGroupError("another tenant already uses the control group of the launcher's container")
    return found if inside or alone else None


def new_group(hierarchy: Hierarchy, pid: int, mark: str, tenant: str) -> Path:
    """Path of a new control group for a tenant. It has the parent of the launcher's group, whose limits still apply.
    Raises NoGroupError if the launcher's group has limits, which the launcher would leave.
    """
    group = hierarchy.of(pid)
    for name in BOUNDS:
        try:
            value = hierarchy.read(group, name).split()
        except OSError:
            continue
        if group != hierarchy.root and value[:1] != ["max"]:
            raise NoGroupError(f"the launcher's control group has a limit ({name}), which the tenant would escape")
    parent = group if group == hierarchy.root else group.parent
    stem = mark + re.sub(r"[^A-Za-z0-9_.-]", "_", tenant)[:100]
    return next(path for i in range(1, 1 << 16) if not (path := parent / f"{stem}-{i}").exists())


def _in_container(pid: int) -> bool:
    """Whether a process runs in a container. Then it must not be moved, because it would escape the container's limits.
    """
    try:
        return any(os.readlink(f"/proc/{pid}/ns/{k}") != os.readlink(f"/proc/self/ns/{k}") for k in NAMESPACES)
    except OSError:
        return True
