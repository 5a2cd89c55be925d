"""Finds the control group for a tenant's memory limit: an existing one of its own, or a new one beside its
launcher's.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection
from pathlib import Path

from cotenant.devices.cgroups import Hierarchy

# groups of containers and jobs, which their processes cannot leave, whatever subgroups they create
_PLACE = re.compile(r"(?:^|[:-])[0-9a-f]{64}(?:\.scope)?$|^job_\d+$")
BOUNDS = ("memory.max", "memory.high", "pids.max", "cpu.max")
NAMESPACES = ("mnt", "pid", "cgroup")


class NoGroupError(Exception):
    """A tenant cannot have a control group of its own; the message says why."""


def mark_of(folder: Path) -> str:
    """Prefix of the names of groups that the agent of a folder creates."""
    return f"cotenant-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]}-"


def place_group(group: Path) -> Path | None:
    """The group of the container or job at or above a process's group; None outside of them."""
    for each in (group, *group.parents):
        if _PLACE.search(each.name):
            return each
    return None


def own_group(hierarchy: Hierarchy, pid: int, taken: Collection[Path]) -> Path | None:
    """The group that a launcher has for itself: its container's, or one without other processes. None: its group is
    shared.
    """
    group = hierarchy.of(pid)
    if group == hierarchy.root:
        return None
    inside = _in_container(pid)
    found = (place_group(group) or group) if inside else group
    alone = set(hierarchy.processes(group)) == {pid} and found not in taken
    if inside and found in taken:
        raise NoGroupError("another tenant already uses the control group of its container")
    return found if inside or alone else None


def new_group(hierarchy: Hierarchy, pid: int, mark: str, tenant: str) -> Path:
    """Path of a new group for a tenant, with the same parent as its launcher's, so that limits above still apply."""
    group = hierarchy.of(pid)
    for name in BOUNDS:
        try:
            value = hierarchy.read(group, name).split()
        except OSError:
            continue
        if group != hierarchy.root and value[:1] != ["max"]:
            raise NoGroupError(f"its launcher's control group has a {name} of its own, which it would leave")
    parent = group if group == hierarchy.root else group.parent
    stem = mark + re.sub(r"[^A-Za-z0-9_.-]", "_", tenant)[:100]
    return next(path for i in range(1, 1 << 16) if not (path := parent / f"{stem}-{i}").exists())


def _in_container(pid: int) -> bool:
    """Whether a process runs in a container, whose limits it would escape by being moved."""
    try:
        return any(os.readlink(f"/proc/{pid}/ns/{k}") != os.readlink(f"/proc/self/ns/{k}") for k in NAMESPACES)
    except OSError:
        return True
