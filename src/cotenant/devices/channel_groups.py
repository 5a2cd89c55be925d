"""Controls channel groups of the NVIDIA driver from outside the program that owns them.

A channel group is the unit that the GPU gives time slices to; a program's context has one on the compute engine. A
process that has a duplicate of the program's open file /dev/nvidiactl may set the group's time slice and take its
channels off the GPU, because the driver's objects belong to the open file, not to a process. Numbers and layouts are
those of the driver's public sources, equal in releases 550 to 595; other releases are refused.

The duplicate must be closed as soon as the program has ended, since the driver keeps all of the program's objects while
it is open.
"""

from __future__ import annotations

import ctypes
import fcntl
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cotenant.core.errors import WorkError
from cotenant.policy.shares.slice_tenant import Usage

RELEASES = range(550, 596)
# the release that the software GPU reports; the software GPU has the driver's control calls below, and SOFT_USAGE as a
# control call of its own
SOFTWARE = "software"

# the fields of the driver's control call: client, object, command, flags, params, size, status
_CONTROL = struct.Struct("=IIIIQII")
_REQUEST = 3 << 30 | _CONTROL.size << 16 | ord("F") << 8 | 0x2A
_STATUS_AT = 28
SET_SLICE, GET_SLICE, GET_INFO = 0xA06C0103, 0xA06C0104, 0xA06C0106
DISABLE_CHANNELS = 0x2080110B
GET_UUID = 0x2080014A
SOFT_USAGE = 0x50F70001
MOST_CHANNELS = 64  # largest number of channels in one call
_DISABLE = struct.Struct(f"=B3xIBB6xQ{MOST_CHANNELS}I{MOST_CHANNELS}I")
_UUID = struct.Struct("=III256s")
# longer than any time slice that a driver sets: a larger value means that the driver's structure has another layout
LONGEST_SLICE_US = 10_000_000

Ioctl = Callable[[int, int, bytearray], int]


@dataclass(frozen=True)
class ChannelGroup:
    """The driver's handles of one channel group. `compute`: it is on the compute engine, not on a copy engine."""

    client: int
    device: int
    subdevice: int
    group: int
    channels: tuple[int, ...]
    compute: bool = True


def refusal(release: str) -> str:
    """Why channel groups cannot be controlled with this driver release; empty if they can."""
    if release == SOFTWARE:
        return ""
    major = release.partition(".")[0]
    if not major.isdigit() or int(major) not in RELEASES:
        known = f"{RELEASES[0]} to {RELEASES[-1]}"
        return f"time slices can be controlled with driver releases {known}; this is {release or 'unknown'}"
    return ""


def _driver_ioctl(fd: int, request: int, data: bytearray) -> int:
    return int(fcntl.ioctl(fd, request, data, True))


class ChannelControls:
    """Controls channel groups with one driver release. Methods raise WorkError if the driver refuses, or if the program
    has ended. `fd` is always a duplicate of the program's open file of the driver.
    """

    def __init__(self, release: str, ioctl: Ioctl = _driver_ioctl, library: str = "") -> None:
        """`library`: path of the library that implements the driver, for the software GPU. Raises WorkError if the
        release is not known."""
        if why := refusal(release):
            raise WorkError(why)
        self.release, self.library = release, library
        self._ioctl = ioctl

    def check(self, fd: int, group: ChannelGroup) -> str:
        """Test with read-only calls whether the driver answers as expected. Returns a sentence if not, else empty."""
        try:
            number = self.info(fd, group)
            slice_us = self.slice_us(fd, group)
        except WorkError as error:
            return str(error)
        if number == 0xFFFFFFFF or not 0 < slice_us <= LONGEST_SLICE_US:
            return (
                f"driver {self.release} returned values for a channel group that this version of Cotenant cannot "
                "interpret"
            )
        return ""

    def info(self, fd: int, group: ChannelGroup) -> int:
        """Return the number by which the GPU identifies the channel group."""
        data = bytearray(b"\xff" * 4)
        self._call(fd, group.client, group.group, GET_INFO, data)
        return int.from_bytes(data, "little")

    def slice_us(self, fd: int, group: ChannelGroup) -> int:
        """The channel group's time slice in microseconds."""
        data = bytearray(8)
        self._call(fd, group.client, group.group, GET_SLICE, data)
        return int.from_bytes(data, "little")

    def set_slice(self, fd: int, group: ChannelGroup, slice_us: int) -> None:
        """Set a channel group's time slice. The call takes a third of a millisecond."""
        self._call(fd, group.client, group.group, SET_SLICE, bytearray(slice_us.to_bytes(8, "little")))

    def disable(self, fd: int, groups: Sequence[ChannelGroup]) -> None:
        """Take all channels of these channel groups off the GPU, even during a kernel. The call takes 0.4 to 0.8 ms."""
        self._enable(fd, groups, off=True)

    def enable(self, fd: int, groups: Sequence[ChannelGroup]) -> None:
        """Let the channels of these channel groups run again."""
        self._enable(fd, groups, off=False)

    def gpu_uuid(self, fd: int, group: ChannelGroup) -> str:
        """UUID of the channel group's GPU, as NVML prints it."""
        data = bytearray(_UUID.size)
        self._call(fd, group.client, group.subdevice, GET_UUID, data)
        length, text = _UUID.unpack(data)[2:]
        return bytes(text[:length]).partition(b"\0")[0].decode("ascii", "replace")

    def usage(self, fd: int, group: ChannelGroup) -> Usage:
        """GPU time that the channel group has used; only the software GPU can tell."""
        data = bytearray(24)
        self._call(fd, group.client, group.group, SOFT_USAGE, data)
        return Usage(*struct.unpack("=QQQ", data))

    def _enable(self, fd: int, groups: Sequence[ChannelGroup], *, off: bool) -> None:
        by_subdevice: dict[int, list[tuple[int, int]]] = {}
        for group in groups:
            by_subdevice.setdefault(group.subdevice, []).extend((group.client, c) for c in group.channels)
        for subdevice, channels in by_subdevice.items():
            for start in range(0, len(channels), MOST_CHANNELS):
                part = channels[start : start + MOST_CHANNELS]
                empty = [0] * (MOST_CHANNELS - len(part))
                clients, handles = [c for c, _ in part] + empty, [h for _, h in part] + empty
                data = bytearray(_DISABLE.pack(off, len(part), 0, 0, 0, *clients, *handles))
                self._call(fd, part[0][0], subdevice, DISABLE_CHANNELS, data)

    def _call(self, fd: int, client: int, target: int, command: int, data: bytearray) -> None:
        held = (ctypes.c_char * len(data)).from_buffer(data)
        order = bytearray(_CONTROL.pack(client, target, command, 0, ctypes.addressof(held), len(data), 0))
        try:
            self._ioctl(fd, _REQUEST, order)
        except OSError as error:
            raise WorkError(f"the driver refused control {command:#x}: {error.strerror}") from None
        finally:
            del held
        status = int.from_bytes(order[_STATUS_AT:], "little")
        if status:
            raise WorkError(f"the driver refused control {command:#x} with status {status:#x}")
