"""The turn trace: a file with one JSON line for each turn of a tenant on a GPU.

If the disk is full, lines are lost, but turns are not delayed.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import IO

from cotenant.core.errors import InputError
from cotenant.policy.shares import Ended

RETRY_S = 5.0


def _gap(path: Path) -> bytes:
    """A newline if the existing file ends with an incomplete line, otherwise empty."""
    if not path.is_file() or path.stat().st_size == 0:
        return b""
    # if the file is writable but not readable, its last byte cannot be checked
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return b"" if file.read(1) == b"\n" else b"\n"
    return b""


class TurnTrace:
    """Appends turns to a file, complete lines only. Call `flush` about once a second."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped = 0
        self.fault = ""
        self._lines: list[bytes] = []
        self._retry_at = 0.0
        try:
            self._file: IO[bytes] | None = open(path, "ab", buffering=0)  # noqa: SIM115 lives as long as the agent
        except OSError as error:
            raise InputError(f"the trace cannot be written: {error.strerror}", file=path) from None
        offset_ns = time.time_ns() - time.monotonic_ns()
        head = {"cotenant_turns": 1, "clock": "CLOCK_MONOTONIC", "unix_minus_clock_ns": offset_ns}
        # the first line relates the times to the date, so it is kept until it could be written
        self._head = _gap(path) + json.dumps(head).encode() + b"\n"

    def turn(self, ended: Ended) -> None:
        """Add the line of a turn to the buffer."""
        if len(self._lines) >= 200_000:
            self.dropped += 1
            return
        self._lines.append(
            b'{"gpu":"%s","tenant":"%s","epoch":%d,"start_ns":%d,"end_ns":%d,"quota_ns":%d,"waited_ns":%d,"reason":"%s"}\n'
            % (
                ended.gpu.encode(),
                ended.tenant.encode(),
                ended.epoch,
                ended.start_ns,
                ended.end_ns,
                ended.quota_ns,
                ended.waited_ns,
                ended.reason.encode(),
            )
        )

    def flush(self) -> str:
        """Write the buffer to the file. Returns a sentence if that fails, but only once for each fault; else empty."""
        if not (self._lines or self._head) or self._file is None or time.monotonic() < self._retry_at:
            return ""
        data = self._head + b"".join(self._lines)
        count = len(self._lines)
        self._lines.clear()
        try:
            position = os.fstat(self._file.fileno()).st_size
            written = self._file.write(data)
            if written is not None and written >= len(self._head):
                self._head = b""
            if written is None or written < len(data):
                os.ftruncate(self._file.fileno(), position + data[: written or 0].rfind(b"\n") + 1)
                raise OSError(28, "No space left on device")
        except OSError as error:
            self.dropped += count
            self._retry_at = time.monotonic() + RETRY_S
            fault = f"the trace {self.path} cannot be written ({error.strerror}); turns are not traced"
            if fault != self.fault:
                self.fault = fault
                return fault
            return ""
        self.fault = ""
        return ""

    def close(self) -> None:
        """Write the rest of the buffer and close the file."""
        self._retry_at = 0.0
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None
