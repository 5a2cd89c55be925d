"""Sets memory limits on control groups, and keeps what the driver reported back for each."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from cotenant.core.cgroups import Cgroups
from cotenant.devices.base import Gpu
from cotenant.devices.cards import NO_LIMIT, Card
from cotenant.devices.group_limits import limit_text, near

Key = tuple[Path, str]  # (control group, UUID of the GPU)


class Applied:
    """The limits in force, by control group and GPU. `limits`: the hard limit in bytes that the driver should report.
    `changes`: the number of the agent's last change of that limit; all changes are numbered in order.
    """

    def __init__(self, card: Callable[[Gpu], Card]) -> None:
        self._card = card
        self.limits: dict[Key, int] = {}
        self.changes: dict[Key, int] = {}
        self._numbers = itertools.count()

    def set(self, group: Path, gpu: Gpu, limit_bytes: int | None) -> None:
        """Limit a control group, or clear its limit (None). Raises OSError if the driver refuses the limit or reports
        another one afterwards.
        """
        card, key = self._card(gpu), (group, gpu.uuid)
        self.changes[key] = next(self._numbers)
        if limit_bytes is None:
            card.set_memory_limits(group, 0, NO_LIMIT)
            self.limits.pop(key, None)
            return
        # the soft limit equals the hard limit, so that the driver does not lend the tenant's unused memory to other
        # tenants
        card.set_memory_limits(group, limit_bytes, limit_bytes)
        self.limits[key] = limit_bytes
        now = card.memory_limits(group).hard_bytes
        if not near(now, limit_bytes):
            raise OSError(f"{limit_text(limit_bytes)} were set, and the driver then reported {limit_text(now)}")
        self.limits[key] = now  # the driver may round the limit that was set

    def change(self, group: Path, gpu: Gpu, limit_bytes: int | None) -> None:
        """Set a limit like `set`, but keep the previous limit in force if that fails."""
        key = (group, gpu.uuid)
        before = self.limits.get(key)
        try:
            self.set(group, gpu, limit_bytes)
        except OSError:
            with contextlib.suppress(OSError):
                self.set(group, gpu, before)
            if before is not None:  # if the previous limit could not be set again, the next check sets it
                self.limits[key] = before
            raise

    def used_bytes(self, group: Path, gpu: Gpu) -> int:
        """Return how much memory the processes of a control group use on a GPU. Raises OSError if the driver does not
        report it.
        """
        return self._card(gpu).memory_limits(group).used_bytes

    def reported(self, group: Path, gpu: Gpu) -> int:
        """Return the hard limit of a control group that the driver reports for a GPU. Raises OSError if the driver
        does not report it.
        """
        return self._card(gpu).memory_limits(group).hard_bytes

    def below(self, hierarchy: Cgroups, group: Path, gpu: Gpu) -> Iterator[Path]:
        """Groups below `group` that have a limit of their own. The driver charges a process's memory only to the
        nearest group with a limit, so processes in these groups do not count for `group`. Raises OSError
        if the driver does not report a limit.
        """
        card = self._card(gpu)
        for each in hierarchy.groups(group):
            if each == group:
                continue
            theirs, mine = card.memory_limits(each), card.memory_limits(group)
            # For a group without a limit of its own, the driver reports the limit and the use of the group above. If
            # the two readings differ, `group` is read again, since its use may have changed between them.
            if theirs != mine and theirs != card.memory_limits(group):
                yield each

    def forget(self, group: Path) -> None:
        """Forget the limits of a control group that no longer exists or was released."""
        for known in (self.limits, self.changes):
            for key in [key for key in known if key[0] == group]:
                del known[key]
