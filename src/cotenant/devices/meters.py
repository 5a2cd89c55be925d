"""Meters of the GPU time that processes have used, as the GPU or its driver counts it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from cotenant.core.errors import WorkError
from cotenant.devices.channel_groups import ChannelControls, ChannelGroup
from cotenant.policy.shares.slice_tenant import Usage


class Held(NamedTuple):
    """A process's channel group, and a duplicate of the process's open driver file, to which the group belongs."""

    pid: int
    fd: int
    group: ChannelGroup
    run_us: int = 0  # length in us of one run of the process on the GPU if its work does not end before; 0: not known


class Meter(Protocol):
    """Reads the GPU time that each process has used on one GPU."""

    def read(self, held: Iterable[Held]) -> dict[int, Usage]:
        """GPU time of processes (pid -> usage), counted from an arbitrary start that is the same in all calls."""

    def close(self) -> None:
        """Close the files that the meter uses."""


class ControlMeter:
    """Reads the GPU time of each channel group, which only the software GPU can tell."""

    def __init__(self, controls: ChannelControls) -> None:
        self._controls = controls

    def read(self, held: Iterable[Held]) -> dict[int, Usage]:
        """See Meter."""
        found: dict[int, Usage] = {}
        for pid, fd, group, _ in held:
            try:
                more = self._controls.usage(fd, group)
            except WorkError:
                continue  # the process has just ended, so it has no group any more
            before = found.get(pid, Usage())
            found[pid] = Usage(*(a + b for a, b in zip(before, more, strict=True)))
        return found

    def close(self) -> None:
        """See Meter."""
