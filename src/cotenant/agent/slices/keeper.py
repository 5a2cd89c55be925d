"""The keeper: a small process that lets tenants stopped by the agent run again if the agent dies or is suspended.

The GPU gives time slices to channel groups. The agent stops a tenant's GPU work by disabling the channels of the
tenant's groups, and resumes it by enabling them. The keeper knows all groups, so that it can enable them.

The agent starts it as `python -m cotenant.agent.slices.keeper FD`, where FD is a socket to the agent. Each message of
the agent is a JSON object with these keys:

- `controls` (release of the driver) and `library` (path of the software GPU's library): the first message
- `hold` (a number that the agent gives the group), `pid`, `group` (fields of ChannelGroup) and `slice_us` (the time
  slice that the keeper gives the group when the agent has ended): a new group; the message carries a descriptor of the
  driver file (/dev/nvidiactl) that controls the group
- `drop` (the group's number): the group has ended
- no key: a heartbeat

The driver keeps a process's resources while a driver file of that process is open, so the keeper closes these files as
soon as the process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import time
from dataclasses import dataclass

from cotenant.core.errors import WorkError
from cotenant.devices.channel_groups import SOFTWARE, ChannelControls, ChannelGroup

SILENCE_S = 0.6  # if the agent has sent no message for this long, the keeper lets all tenants run
# after the agent's end, the keeper tries for this long, and each time after a pause, to enable channels that the driver
# refuses to enable
LAST_S, PAUSE_S = 10.0, 0.1
MESSAGE_BYTES = 4096


@dataclass
class Kept:
    """A channel group of a process, with the descriptors that control it."""

    pid: int
    fd: int
    pidfd: int
    group: ChannelGroup
    slice_us: int  # the time slice that the driver gives the channel group by default


class Keeper:
    """Keeps channel groups until the agent drops them or their process ends; enables all if the agent is silent."""

    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._controls: ChannelControls | None = None
        self._kept: dict[int, Kept] = {}
        self._enabled = True  # whether the groups have been enabled since the last message
        self._refused: set[int] = set()  # numbers of the groups that the driver has refused to enable then

    def run(self) -> None:
        """Run until the agent has ended; then enable all channel groups, with the time slices that the driver gives by
        default.
        """
        while True:
            ready = self._wait([self._agent.fileno()], PAUSE_S if self._refused else SILENCE_S)
            if self._agent.fileno() in ready:
                if not self._hear():
                    break
                self._enabled, self._refused = False, set()
            elif not ready and (self._refused or not self._enabled):
                self._enable()
        self._enable()
        end = time.monotonic() + LAST_S
        while self._refused and time.monotonic() < end:
            self._wait([], PAUSE_S)
            self._enable()
        for kept in self._kept.values():
            with contextlib.suppress(WorkError):
                if self._controls is not None:
                    self._controls.set_slice(kept.fd, kept.group, kept.slice_us)

    def _wait(self, fds: list[int], most_s: float) -> list[int]:
        """Wait until one of the descriptors can be read or a process of a group ends. Returns those that are ready."""
        watched = {kept.pidfd: number for number, kept in self._kept.items() if kept.pidfd >= 0}
        ready = select.select([*fds, *watched], [], [], most_s)[0]
        for fd in ready:
            if fd in watched:
                self._drop(watched[fd])
        return ready

    def _hear(self) -> bool:
        """Handle one message of the agent. Returns False if the agent has ended."""
        try:
            data, fds, _, _ = socket.recv_fds(self._agent, MESSAGE_BYTES, 1)
        except OSError:
            return False
        if not data:
            return False
        order = json.loads(data)
        if "controls" in order:
            self._controls = controls_of(order["controls"], order["library"])
        elif "hold" in order and fds:
            self._hold(order, fds[0])
        elif "drop" in order:
            self._drop(order["drop"])
        return True

    def _hold(self, order: dict[str, object], fd: int) -> None:
        self._drop(order["hold"])
        group = order["group"]
        assert isinstance(group, list)
        pid, slice_us = order["pid"], order["slice_us"]
        assert isinstance(pid, int)
        assert isinstance(slice_us, int)
        pidfd = -1
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
        number = order["hold"]
        assert isinstance(number, int)
        client, device, subdevice, handle, channels, compute = group
        held = ChannelGroup(client, device, subdevice, handle, tuple(channels), compute)
        self._kept[number] = Kept(pid, fd, pidfd, held, slice_us)

    def _drop(self, number: object) -> None:
        kept = self._kept.pop(number, None) if isinstance(number, int) else None
        if kept is not None:
            os.close(kept.fd)
            if kept.pidfd >= 0:
                os.close(kept.pidfd)

    def _enable(self) -> None:
        """Enable all channel groups, or those for which the driver has just refused that."""
        groups = self._refused.intersection(self._kept) if self._refused else set(self._kept)
        self._enabled, self._refused = True, set()
        if self._controls is None:
            return
        for number in groups:
            kept = self._kept[number]
            try:
                self._controls.enable(kept.fd, [kept.group])
            except WorkError:
                self._refused.add(number)


def controls_of(release: str, library: str) -> ChannelControls:
    """Control of channel groups for a driver release. `library`: path of the software GPU's library, used if `release`
    is that of the software GPU.
    """
    if release != SOFTWARE:
        return ChannelControls(release)
    from cotenant.softgpu.controls import SoftIoctl

    return ChannelControls(release, SoftIoctl(library))


def main() -> None:
    """Serve the agent at the other end of the socket whose descriptor is the first argument."""
    Keeper(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
