"""The keeper: a process that kills the programs of a server that has ended without stopping them itself. Lines `+PID`
and `-PID` on the keeper's standard input name process groups that have started and ended. When the input ends, the
keeper kills the remaining groups. This module uses only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys


class Keeper:
    """The server's end of the pipe to the keeper process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        self.groups: set[int] = set()

    def begin(self, group: int) -> None:
        """Tell the keeper process that a process group has started."""
        self.groups.add(group)
        self._tell(f"+{group}\n")

    def ended(self, group: int) -> None:
        """Kill what is left of a process group that has ended, and tell the keeper process."""
        if group in self.groups:
            self.groups.discard(group)
            kill_group(group)
            self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        # if the keeper was killed, only an orderly end of the server ends the programs
        with contextlib.suppress(OSError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def close(self) -> None:
        """Kill all process groups that remain, and end the keeper's process."""
        for group in list(self.groups):
            self.ended(group)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()


def kill_group(group: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to all processes of a group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def main() -> None:
    """Read process groups until the server has ended, then kill those that remain."""
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
