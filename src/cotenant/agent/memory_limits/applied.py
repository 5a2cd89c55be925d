"""Sets memory limits on control groups, and keeps what the driver reported back for each."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from cotenant.core.cgroups import Cgroups
from cotenant.devices.base import Gpu
from cotenant.devices.cards import NO_LIMIT, Card
from cotenant.devices.group_limits import limit_text, near

Key = tuple[Path, str]  # (control group, UUID of the GPU)
Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class Applied:
    """The limits in force, by control group and GPU. `limits`: the hard limit in bytes that the driver should report.
    `changes`: the number of the agent's last complete change of that limit; all changes are numbered in order.
    `changing`: the limit that is being changed now.

    The driver may take milliseconds to change a limit, while the event loop also switches tenants. So one thread makes
    all changes, in the order in which they were given.
    """

    def __init__(self, card: Callable[[Gpu], Card]) -> None:
        self._card = card
        self.limits: dict[Key, int] = {}
        self.changes: dict[Key, int] = {}
        self.changing: Key | None = None
        self._as_given: dict[Key, int | None] = {}  # the limits before the driver rounded them
        self._numbers = itertools.count()
        self._thread = ThreadPoolExecutor(1, "memory-limits")
        self._last: Future[Any] | None = None

    def give(
        self, call: Callable[Arguments, Answer], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Future[Answer]:
        """Let the thread make this call after all that were given before. Everything that changes limits is called
        like this.
        """
        self._last = given = self._thread.submit(call, *arguments, **named)
        return given

    async def done(
        self, call: Callable[Arguments, Answer], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Answer:
        """`give` a call, and return what it returns. If the waiting task is cancelled, the call is still made."""
        return await asyncio.shield(asyncio.wrap_future(self.give(call, *arguments, **named)))

    def is_set(self, group: Path, gpu: Gpu, limit_bytes: int | None) -> bool:
        """Whether this is the limit of a control group (None: it has none), and no change has been given since."""
        known = self._as_given.get((group, gpu.uuid), "unknown")
        return known == limit_bytes and (self._last is None or self._last.done())

    def set(self, group: Path, gpu: Gpu, limit_bytes: int | None) -> None:
        """Limit a control group, or clear its limit (None). Raises OSError if the driver refuses the limit or reports
        another one afterwards.
        """
        key = (group, gpu.uuid)
        self.changing = key
        self._as_given.pop(key, None)
        try:
            self._set(key, self._card(gpu), limit_bytes)
        finally:
            self.changes[key] = next(self._numbers)
            self.changing = None
        self._as_given[key] = limit_bytes

    def _set(self, key: Key, card: Card, limit_bytes: int | None) -> None:
        group = key[0]
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
        for key in [key for key in list(self.changes) if key[0] == group]:
            for known in (self.limits, self.changes, self._as_given):
                known.pop(key, None)
