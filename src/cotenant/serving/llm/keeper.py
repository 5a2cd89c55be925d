"""Ends the programs of a server that has ended without doing it itself: a process of its own, told of each by a line.

`+PID` and `-PID` on standard input name process groups that begin and have ended. When the input ends, those that are
left are killed. It needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys


class Keeper:
    """The server's end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        self.groups: set[int] = set()

    def begin(self, group: int) -> None:
        """A process group has begun."""
        self.groups.add(group)
        self._tell(f"+{group}\n")

    def ended(self, group: int) -> None:
        """And ended: all that is left of it is killed."""
        if group in self.groups:
            self.groups.discard(group)
            kill_group(group)
            self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has been killed: the server's own ending is what is left
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def close(self) -> None:
        """Kill what is left, and the keeper's process."""
        for group in list(self.groups):
            self.ended(group)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()


def kill_group(group: int, number: int = signal.SIGKILL) -> None:
    """A signal for all processes of a group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def main() -> None:
    """Listen until the server has gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        groups.add(group) if line[0] == "+" else groups.discard(group)
    for group in groups:
        kill_group(group)


if __name__ == "__main__":
    main()
