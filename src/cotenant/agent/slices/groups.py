"""The channel groups of connected processes, with the driver's files that control them. A channel group is the unit
that the GPU gives time slices to.

A process sends its groups and a duplicate of its open file of the driver. The agent closes that file as soon as the
process has ended, because the driver keeps all of the process's resources while the file is open.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from cotenant.abi.protocol import Status
from cotenant.agent.ipc import wire
from cotenant.agent.ipc.wire import BadMessageError
from cotenant.agent.tenants.tenant import Session
from cotenant.core.errors import WorkError
from cotenant.devices.channel_groups import ChannelControls, ChannelGroup
from cotenant.devices.meters import Held

MOST_GROUPS = 256  # largest number of channel groups of a process
MOST_CHANNELS = 50

_GroupKey = tuple[int, int, int]  # process, client of the driver, handle of the group


@dataclass(eq=False)
class SessionGroups:
    """Channel groups of one process. `gpu_of`: UUID of each group's GPU."""

    pid: int
    # client of the driver -> descriptor of the driver's file on which the client was created
    files: dict[int, int] = field(default_factory=dict)
    groups: dict[tuple[int, int], ChannelGroup] = field(default_factory=dict)  # (client, handle)
    gpu_of: dict[tuple[int, int], str] = field(default_factory=dict)

    def held(self, key: tuple[int, int]) -> Held:
        """A channel group with the driver's file that controls it."""
        return Held(self.pid, self.files[key[0]], self.groups[key])

    def on(self, gpu: str, *, compute: bool = True) -> Iterator[Held]:
        """The process's channel groups on a GPU; `compute`: only those of the compute engine."""
        for key, group in self.groups.items():
            if self.gpu_of.get(key) == gpu and (group.compute or not compute):
                yield self.held(key)

    def close(self) -> None:
        """Close the driver's files of a process that has ended."""
        for fd in self.files.values():
            with contextlib.suppress(OSError):
                os.close(fd)
        self.files.clear()
        self.groups.clear()
        self.gpu_of.clear()


class GroupTable:
    """Channel groups of all connected processes."""

    def __init__(self) -> None:
        self.sessions: dict[Session, SessionGroups] = {}

    def take(self, session: Session, data: bytes) -> tuple[tuple[int, int], ChannelGroup | None]:
        """Handle a CHANNEL_GROUP message. Returns the key of the channel group, and the group, or None if it has ended.
        Raises BadMessageError if the message is invalid.
        """
        values = wire.fields("channel_group", data)
        count, key = values["channel_count"], (values["client"], values["group"])
        mine = self.sessions.setdefault(session, SessionGroups(session.peer.pid))
        if count > MOST_CHANNELS or (count and len(mine.groups) >= MOST_GROUPS and key not in mine.groups):
            raise BadMessageError(Status.TOO_MANY, f"a process may have {MOST_GROUPS} channel groups, not more")
        fd = session.passed.pop() if session.passed else -1
        if not count:
            if fd >= 0:
                os.close(fd)
            mine.groups.pop(key, None)
            if not any(client == key[0] for client, _ in mine.groups) and key[0] in mine.files:
                os.close(mine.files.pop(key[0]))
            return key, None
        if fd >= 0 and key[0] in mine.files:
            os.close(fd)  # the agent already has this file, so the new descriptor is not needed
        elif fd >= 0:
            mine.files[key[0]] = fd
        if key[0] not in mine.files:
            raise BadMessageError(Status.BAD_MESSAGE, "a channel group came without the driver's file")
        channels = struct.unpack_from(f"={count}I", values["channels"])
        group = ChannelGroup(*key[:1], values["device"], values["subdevice"], key[1], channels, bool(values["compute"]))
        mine.groups[key] = group
        return key, group

    def on(self, gpu: str, sessions: list[Session], *, compute: bool = True) -> list[Held]:
        """Channel groups of these processes on a GPU."""
        return [held for s in sessions if s in self.sessions for held in self.sessions[s].on(gpu, compute=compute)]

    def forget(self, session: Session) -> SessionGroups | None:
        """Forget the channel groups of a process that has ended, and close the driver's files that control them."""
        mine = self.sessions.pop(session, None)
        if mine is not None:
            mine.close()
        return mine


class OffChannels:
    """The channels that are disabled, each disabled once. The driver counts: a channel that was disabled twice runs
    again only after it was enabled twice. If a group gets a new channel while its earlier channels are disabled,
    only the new channel is disabled: the earlier ones, if disabled a second time, would not run again.
    """

    def __init__(self) -> None:
        self._off: dict[_GroupKey, tuple[int, ...]] = {}  # a group -> its channels that are disabled

    def assume(self, held: Held) -> None:
        """Record that all channels of a group may be disabled. Enabling those that are not has no effect."""
        self._off[self._key(held)] = held.group.channels

    def disable(self, controls: ChannelControls, held: Held) -> None:
        """Disable those channels of a group that are still enabled. Raises WorkError if the driver refuses; then they
        stay enabled.
        """
        key = self._key(held)
        off = self._off.get(key, ())
        new = tuple(channel for channel in held.group.channels if channel not in off)
        if not new:
            return
        self._off[key] = off + new
        part = replace(held.group, channels=new)
        try:
            controls.disable(held.fd, [part])
        except WorkError:
            # the driver may have disabled some of them; if it also refuses this, all are enabled by the next `enable`
            controls.enable(held.fd, [part])
            self._keep_off(key, off)
            raise

    def enable(self, controls: ChannelControls, held: Held) -> None:
        """Enable those channels of a group that were disabled. Raises WorkError if the driver refuses; then they are
        enabled by the next call.
        """
        key = self._key(held)
        if off := self._off.get(key, ()):
            controls.enable(held.fd, [replace(held.group, channels=off)])
            self._keep_off(key, ())

    def put_right(self, controls: ChannelControls, groups: Iterable[Held], *, on: bool) -> None:
        """Enable (`on`) or disable channels for which the driver has refused that. It may refuse again."""
        for held in groups:
            with contextlib.suppress(WorkError):
                (self.enable if on else self.disable)(controls, held)

    def forget(self, pid: int) -> None:
        """Forget the disabled channels of a process that has ended."""
        for key in [key for key in self._off if key[0] == pid]:
            del self._off[key]

    def _keep_off(self, key: _GroupKey, off: tuple[int, ...]) -> None:
        if off:
            self._off[key] = off
        else:
            self._off.pop(key, None)

    @staticmethod
    def _key(held: Held) -> _GroupKey:
        return held.pid, held.group.client, held.group.group
