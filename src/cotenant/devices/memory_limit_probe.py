"""Finds out whether kernel or driver can limit a GPU's memory by control group. As root it sets a limit as a trial."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path

from cotenant.core.cgroups import MOUNT, Cgroups, delegate_down, version_at
from cotenant.devices.base import Device, Gpu
from cotenant.devices.cards import FUNCTION_NOT_FOUND, NO_LIMIT, NO_PERMISSION, Card, NvmlError
from cotenant.devices.group_limits import OWN, near, reason_of
from cotenant.policy.memory_limits import Detected, GroupLimit

TRIAL = f"{OWN}trial"
TRIAL_BYTES = 1 << 30
# A trial's control group that is older than this was left behind by a process that was killed, and is removed. A trial
# takes far less time.
OLD_S = 60.0


def detect(device: Device, gpu: Gpu) -> Detected:
    """Find out what can enforce memory limits on one GPU. As root, this creates a control group, sets a limit, reads it
    back, and removes the group.
    """
    return replace(_detect(device, gpu), remedy=device.limits_remedy)


def _detect(device: Device, gpu: Gpu) -> Detected:
    hierarchy, card = device.cgroups(), device.card(gpu.uuid)
    release, root = device.release(), os.geteuid() == 0
    version = hierarchy.version if hierarchy is not None else version_at(MOUNT)
    if card is None or hierarchy is None:  # without NVML, or without limits by control group, nothing can be tried
        return Detected(release, cgroup=version, root=root, mig=card is not None and card.mig())
    if version != 2:
        return Detected(release, has_call(card, Path("/")), version, root=root, mig=card.mig())
    region = region_of(hierarchy, card)
    call, trial = has_call(card, hierarchy.root), ""
    if call:
        trial, root = _tried(hierarchy, card, dmem=bool(region), root=root)
    foreign = foreign_limits(hierarchy, region, gpu.memory_bytes) if region else ()
    return Detected(release, call, version, bool(region), root, card.mig(), trial, foreign)


def has_call(card: Card, group: Path) -> bool:
    """Whether this NVML has the functions for memory limits of control groups."""
    try:
        card.memory_limits(group)
    except NvmlError as error:
        return error.code != FUNCTION_NOT_FOUND
    return True


def region_of(hierarchy: Cgroups, card: Card) -> str:
    """The kernel's name for a GPU's memory (nvidia/00000000:02:00.0/vidmem); empty if the kernel does not count it."""
    with contextlib.suppress(OSError):
        bus = card.bus_id().lower()
        for line in hierarchy.read(hierarchy.root, "dmem.capacity").splitlines():
            if line and bus in line.lower():
                return line.split()[0]
    return ""


def foreign_limits(hierarchy: Cgroups, region: str, memory_bytes: int) -> tuple[GroupLimit, ...]:
    """Find the control groups that no agent created and whose limit in dmem.max is below the size of the GPU's memory.
    Returns each with its limit.
    """
    found = []
    for group in hierarchy.groups(hierarchy.root):
        limit = dmem_max(hierarchy, group, region)
        if limit is not None and limit < memory_bytes and not group.name.startswith(OWN):
            found.append(GroupLimit(group, limit))
    return tuple(found)


def dmem_max(hierarchy: Cgroups, group: Path, region: str) -> int | None:
    """Limit in bytes in a group's file dmem.max; None if there is no limit or no such file."""
    with contextlib.suppress(OSError):
        for line in hierarchy.read(group, "dmem.max").splitlines():
            name, _, value = line.partition(" ")
            if name == region and value.strip().isdigit():
                return int(value)
    return None


def _tried(hierarchy: Cgroups, card: Card, *, dmem: bool, root: bool) -> tuple[str, bool]:
    """Try to set a limit on a new control group. Returns why that failed (empty if it worked), and whether this process
    has the right to set limits.
    """
    group = hierarchy.root / f"{TRIAL}-{os.getpid()}"
    _remove_left(hierarchy, group)
    try:
        if dmem:
            delegate_down(hierarchy, group, "dmem")
        hierarchy.create(group)
    except OSError as error:
        return f"no control group can be created below {hierarchy.root} ({reason_of(error)})", root
    try:
        card.set_memory_limits(group, 0, TRIAL_BYTES)
        held = card.memory_limits(group).hard_bytes
        card.set_memory_limits(group, 0, NO_LIMIT)
        return "" if near(held, TRIAL_BYTES) else f"{TRIAL_BYTES} bytes were set and {held} read back", True
    except NvmlError as error:
        if error.code == NO_PERMISSION:
            return "", False
        return reason_of(error), True
    finally:
        with contextlib.suppress(OSError):
            hierarchy.remove(group)


def _remove_left(hierarchy: Cgroups, mine: Path) -> None:
    """Remove control groups left by trials whose process was killed. A group with this process's pid in its name is
    also removed: an earlier process with the same pid left it.
    """
    for group in list(hierarchy.root.glob(f"{TRIAL}-*")):
        with contextlib.suppress(OSError):
            # a process in another PID namespace is not in /proc, so a group must also be old to count as left behind
            old = time.time() - group.stat().st_ctime > OLD_S
            if group == mine or (old and not os.path.exists(f"/proc/{group.name.rpartition('-')[2]}")):
                hierarchy.remove(group)
