"""Waits for sockets to appear or disappear in a folder: by inotify, or by polling if inotify is exhausted."""

from __future__ import annotations

import ctypes
import os
import select
import struct
from pathlib import Path

MOVED_FROM, MOVED_TO, CREATED, DELETED, IGNORED = 0x40, 0x80, 0x100, 0x200, 0x8000
POLL_S = 0.25
_EVENT = struct.Struct("iIII")


class FolderWatch:
    """Wakes its single waiter when a file *.sock of the folder appears or disappears, or by `wake` from another
    thread.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._libc = ctypes.CDLL(None, use_errno=True)
        # -1 means that the limit on inotify instances is reached, or that inotify is not permitted
        self._inotify: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._watching = False
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._add()

    def _add(self) -> None:
        """Watch the folder; watch it again if it was replaced by another folder of that name."""
        if self._inotify >= 0:
            mask = MOVED_FROM | MOVED_TO | CREATED | DELETED
            self._watching = self._libc.inotify_add_watch(self._inotify, os.fsencode(self._folder), mask) >= 0

    def wait(self, seconds: float) -> bool:
        """Wait for at most `seconds`; returns whether a socket appeared or disappeared, or `wake` was called."""
        if not self._watching:
            self._add()
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        if self._watching:
            poll.register(self._inotify, select.POLLIN)
        else:
            seconds = min(seconds, POLL_S)
        for number, _ in poll.poll(seconds * 1000):
            if number == self._woken:
                os.eventfd_read(self._woken)
                return True
            if self._read():
                return True
        return False

    def _read(self) -> bool:
        """Read inotify events; returns whether one was about a socket or the folder itself."""
        data, offset, found = os.read(self._inotify, 1 << 16), 0, False
        while offset < len(data):
            _, mask, _, length = _EVENT.unpack_from(data, offset)
            offset += _EVENT.size
            name = data[offset : offset + length].rstrip(b"\0")
            offset += length
            if mask & IGNORED:
                self._watching = False
            found |= bool(mask & IGNORED) or name.endswith(b".sock")
        return found

    def wake(self) -> None:
        """Wake the waiter."""
        os.eventfd_write(self._woken, 1)

    def close(self) -> None:
        """Close the descriptors."""
        for number in (self._inotify, self._woken):
            if number >= 0:
                os.close(number)
