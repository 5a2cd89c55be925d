"""The folder of one attempt on one node, with a memory-mapped file, the page, by which the node runtime and the runner
communicate. Standard library only.

The page is a file of fixed size whose blocks are allocated when it is created, so that a disk that fills up later
cannot hide an exit. Each field has one writer at a time: if the runner has died, the node runtime records the exit in
its place. Aligned fields of eight bytes are written atomically.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import sys
from pathlib import Path
from typing import Any

PAGE_BYTES = 8192
ORDER_FILE = "order.json"
LIMITS_FILE = "limits.json"
PAGE_FILE = "page"

# phases of an attempt, which the runner writes; a node that finds the runner dead writes ENDED
NEW, RUNNING, STOPPING, ENDED = 0, 1, 2, 3

_FIELD = struct.Struct("<q")
_FIELDS = {
    name: 8 + 8 * i
    for i, name in enumerate(
        (
            "created_ns",  # written by the node: time at which the page was created
            # written by the node: end of the lease, by this machine's monotonic clock; 0: there is no lease
            "until_ns",
            "stop",  # written by the node: 1 if a stop was requested
            "grace_ns",  # written by the node: time from the stop request to SIGKILL
            "phase",
            # this field and the next four are written by the runner; if it has died, the node writes the last two
            "runner_pid",
            "started_ns",  # time at which the attempt's processes started
            "stopping_ns",
            "ended_ns",
            "exit_bytes",  # length of the JSON text at EXIT_AT, which describes the exit
            "boot",  # written by the node: value of this_boot() when the page was created
        )
    )
}
_EXIT_AT = 1024
# offset in the page of the ranks' process groups; by these a node can kill processes that a dead runner has left behind
_GROUPS_AT = 128
MOST_GROUPS = 100


def this_boot() -> int:
    """A number that identifies the machine's current boot. Numbers of process groups from an earlier boot now belong to
    other processes."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return 0
    return int(text.replace("-", "")[:15], 16)


class Page:
    """The mapped page of an attempt to run a job. The attempt's runner holds the page's lock as long as it is alive."""

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        self._fd = os.open(folder / PAGE_FILE, flags, 0o600)
        try:
            if create:
                os.posix_fallocate(self._fd, 0, PAGE_BYTES)
            self._map = mmap.mmap(self._fd, PAGE_BYTES)
        except BaseException:
            os.close(self._fd)
            raise

    def get(self, name: str) -> int:
        """A field."""
        value: int = _FIELD.unpack_from(self._map, _FIELDS[name])[0]
        return value

    def set(self, name: str, value: int) -> None:
        """Write a field of the page by which the node runtime and the runner of an attempt communicate."""
        at = _FIELDS[name]
        self._map[at : at + 8] = _FIELD.pack(value)

    def set_groups(self, groups: list[int]) -> None:
        """Store the process groups of the job's ranks in the page."""
        for i, group in enumerate([*groups, 0][:MOST_GROUPS]):
            at = _GROUPS_AT + 8 * i
            self._map[at : at + 8] = _FIELD.pack(group)

    def groups(self) -> list[int]:
        """Process groups that the runner started; empty after a reboot, which has ended them."""
        found: list[int] = []
        if self.get("boot") != this_boot():
            return found
        for i in range(MOST_GROUPS):
            group: int = _FIELD.unpack_from(self._map, _GROUPS_AT + 8 * i)[0]
            if group <= 1:
                break
            found.append(group)
        return found

    def end(self, exit_: dict[str, Any], ended_ns: int) -> None:
        """Record in the page how the attempt ended. The phase is written last, so that a reader who sees the phase
        ENDED sees the whole exit record.
        """
        raw = json.dumps(exit_).encode()
        if len(raw) > PAGE_BYTES - _EXIT_AT:
            raw = json.dumps({**exit_, "codes": {}, "error": str(exit_.get("error", ""))[:500]}).encode()
        self._map[_EXIT_AT : _EXIT_AT + len(raw)] = raw
        self.set("exit_bytes", len(raw))
        self.set("ended_ns", ended_ns)
        self.set("phase", ENDED)

    def end_lost(self, error: str, ended_ns: int) -> None:
        """Record that the attempt to run a job ended because its runner died."""
        more = {"codes": {}, "oom": False, "started": bool(self.get("started_ns"))}
        self.end(lost_exit(error) | more, ended_ns)

    def exit(self) -> dict[str, Any]:
        """The exit status that `end` recorded; empty while the attempt runs."""
        length = self.get("exit_bytes")
        if not 0 < length <= PAGE_BYTES - _EXIT_AT:
            return {}
        found: dict[str, Any] = json.loads(self._map[_EXIT_AT : _EXIT_AT + length])
        return found

    def lock(self, *, wait: bool) -> bool:
        """Take the runner's lock on the page; False if another process holds it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def runner_lives(self) -> bool:
        """Return whether a runner holds the lock on the page, which means that it is alive."""
        if self.lock(wait=False):
            self.unlock()
            return False
        return True

    def unlock(self) -> None:
        """Release the runner's lock on the page."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Unmap."""
        self._map.close()
        os.close(self._fd)


def lost_exit(error: str) -> dict[str, Any]:
    """The exit record of an attempt to run a job whose processes ended and whose runner recorded no exit."""
    return {"code": 1, "lost": True, "asked": "", "error": error}


def runner_command(folder: Path) -> list[str]:
    """Return the command that starts the runner of an attempt to run a job. It leaves out site packages, so that the
    runner is small and starts fast.
    """
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name("runner.py")), str(folder)]
