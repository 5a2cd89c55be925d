"""How much of a GPU's time processes have had, as the GPU or its driver accounts it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from cotenant.core.errors import WorkError
from cotenant.devices.channel_groups import ChannelControls, ChannelGroup
from cotenant.policy.shares.slice_tenant import Usage


class Held(NamedTuple):
    """A process's channel group, with the file that its driver's client was made on."""

    pid: int
    fd: int
    group: ChannelGroup
    run_us: int = 0  # length of the process's runs while it has work; 0: not known


class Meter(Protocol):
    """Reads what processes have had of one GPU."""

    def read(self, held: Iterable[Held]) -> dict[int, Usage]:
        """Process -> what it has had since some moment of the past, for those that are known."""

    def close(self) -> None:
        """Release what the meter holds."""


class ControlMeter:
    """Asks each group; only the software GPU answers."""

    def __init__(self, controls: ChannelControls) -> None:
        self._controls = controls

    def read(self, held: Iterable[Held]) -> dict[int, Usage]:
        """See Meter."""
        found: dict[int, Usage] = {}
        for pid, fd, group, _ in held:
            try:
                more = self._controls.usage(fd, group)
            except WorkError:
                continue  # its process has just ended
            before = found.get(pid, Usage())
            found[pid] = Usage(*(a + b for a, b in zip(before, more, strict=True)))
        return found

    def close(self) -> None:
        """See Meter."""
