"""Clears the memory limits of control groups whose tenants have ended, and removes the groups that the agent made.

The limits stay until no process is left. What cannot be cleared or removed is tried again at every check: a limit that
is not cleared would apply to whatever runs in the group next. The driver adds a group's soft limit to those of the
groups above; if the group is removed before its soft limit is cleared, those sums stay too high.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cotenant.agent.memory_limits.applied import Applied
from cotenant.agent.tenants.tenant import ControlGroup
from cotenant.core.cgroups import Cgroups
from cotenant.devices.base import Gpu
from cotenant.devices.cards import FUNCTION_NOT_FOUND, NOT_FOUND, NOT_SUPPORTED, NvmlError
from cotenant.devices.group_limits import reason_of
from cotenant.devices.registry import device_of

LOG = logging.getLogger(__name__)
NOTHING_SET = (NOT_SUPPORTED, NOT_FOUND, FUNCTION_NOT_FOUND)  # NVML errors that mean that a group has no limit to clear
# number of checks after which a tenant's control group is removed even if the limit could not be cleared, since the GPU
# may have been removed for good
CLEAR_TRIES = 30


@dataclass(eq=False)
class _Closing:
    """A control group whose tenant has ended."""

    group: ControlGroup
    gpus: tuple[Gpu, ...]
    name: str
    tries: int = 0
    said: str = ""  # why the control group could not be closed, as it was logged last


Users = dict[_Closing, list[int]]  # pids of the processes on the GPUs of an ended tenant


class Closings:
    """The control groups of ended tenants that are not closed yet. A group is closed when it has no processes any
    more: its limits are cleared, and it is removed if the agent made it.
    """

    def __init__(self, applied: Applied, hierarchy: Callable[[tuple[Gpu, ...]], Cgroups]) -> None:
        self._applied, self._hierarchy = applied, hierarchy
        self._each: list[_Closing] = []

    def add(self, group: ControlGroup, gpus: tuple[Gpu, ...], name: str) -> None:
        """Close a control group when its last process has gone: clear its limits, and remove it if the agent made it.
        """
        self.take(group.path)
        self._each.append(_Closing(group, gpus, name))

    def take(self, path: Path) -> None:
        """Do not close this control group, because a tenant uses it again."""
        self._each = [each for each in self._each if each.group.path != path]

    def groups(self) -> list[ControlGroup]:
        """The control groups of ended tenants that are not closed yet."""
        return [each.group for each in self._each]

    def users(self) -> Users:
        """Processes on the GPUs of each ended tenant whose group the agent did not make. Waits for the driver: call it
        in a thread.
        """
        return {each: self._using(each) for each in list(self._each) if not each.group.made}

    async def sweep(self, users: Users | None = None) -> bool:
        """Close the control groups that have no processes any more. Returns whether a group was closed. `users`: what
        `users` has returned before; a process of an ended tenant that was gone then cannot be back.
        """
        changed = False
        for each in list(self._each):
            if await self._applied.done(self._closed, each, users or {}) and each in self._each:
                self._each.remove(each)
                self._applied.forget(each.group.path)
                changed = True
        return changed

    def _closed(self, each: _Closing, users: Users) -> bool:
        path = each.group.path
        try:
            if each not in self._each:  # a tenant uses the group again, and its limit is set after this
                return False
            if not path.exists():
                return True
            hierarchy = self._hierarchy(each.gpus)
            below = list(hierarchy.groups(path)) if each.group.made else [path]
            if self._busy(hierarchy, each, users):
                return False
            faults = [fault for group in reversed(below) for gpu in each.gpus if (fault := self._clear(group, gpu))]
            each.tries += 1
            if faults and (not each.group.made or each.tries < CLEAR_TRIES):
                raise OSError("; ".join(dict.fromkeys(faults)))
            for group in reversed(below) if each.group.made else ():
                hierarchy.remove(group)
        except OSError as error:
            if each.said != reason_of(error):
                each.said = reason_of(error)
                LOG.warning(f"the control group {path} of {each.name} could not be cleared: {each.said}")
            return False
        return True

    @staticmethod
    def _using(each: _Closing) -> list[int]:
        found = device_of(each.gpus[0]).processes(gpu.uuid for gpu in each.gpus)
        return [pid for pids in found.values() for pid in pids]

    def _busy(self, hierarchy: Cgroups, each: _Closing, users: Users) -> bool:
        """Return whether processes are left in a control group. In a group that the agent did not make, only processes
        that use the GPU count, because the group continues to exist. Raises OSError
        if the processes cannot be read.
        """
        path = each.group.path
        if each.group.made:
            return any(hierarchy.processes(group) for group in hierarchy.groups(path))
        using = users[each] if each in users else self._using(each)
        return any(hierarchy.contains(path, pid) for pid in using)

    def _clear(self, group: Path, gpu: Gpu) -> str:
        """Clear a control group's limit on a GPU. Returns why that failed; empty if the group has no limit any more."""
        try:
            self._applied.set(group, gpu, None)
        except OSError as error:
            gone = isinstance(error, NvmlError) and error.code in NOTHING_SET
            return "" if gone or not group.exists() else f"GPU {gpu.index}: {reason_of(error)}"
        return ""
