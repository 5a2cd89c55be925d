"""Reads the lease of a running job: what the job may use, and until when."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from cotenant.training.contract import CPUS_ENV, MEMORY_ENV, Lease, lease_file, read_lease
from cotenant.training.gang import stated_rank

LOOK_S = 0.05  # interval between two checks of the lease file


class LeaseWatch:
    """Follows the job's lease file. `lease`: the current lease; without a file, the values in environment variables,
    without an end.

    `fenced`: the file is for a later start of this job, so that this process must end.
    """

    def __init__(self, folder: Path | None, attempt: int) -> None:
        self._folder, self._attempt = folder, attempt
        self._rank = stated_rank()
        self._file = None if folder is None else lease_file(folder, self._rank)
        self._seen: tuple[int, int] | None = None
        self._next_s = 0.0
        self.fenced = False
        self.lease = Lease(cpus=_number(CPUS_ENV), memory_bytes=_whole(MEMORY_ENV), attempt=attempt)
        self.look(time.monotonic())

    def look(self, now_s: float) -> bool:
        """If LOOK_S has passed since the last check, read the file. Returns whether the lease has changed."""
        if self._file is None or self._folder is None or now_s < self._next_s:
            return False
        self._next_s = now_s + LOOK_S
        try:
            status = self._file.stat()
        except OSError:
            return False
        seen = (status.st_ino, status.st_mtime_ns)
        if seen == self._seen:
            return False
        found = read_lease(self._folder, self._rank)
        if found is None:
            return False
        self._seen = seen
        self.fenced = found.attempt > self._attempt
        if found.attempt < self._attempt:
            # the file belongs to the previous start of the job; the file of this start has not been written yet
            return False
        before = self.lease
        self.lease = replace(
            found,
            cpus=before.cpus if found.cpus is None else found.cpus,
            memory_bytes=before.memory_bytes if found.memory_bytes is None else found.memory_bytes,
        )
        return self.lease != before

    def over(self, now_s: float) -> bool:
        """Whether the job has to stop: its lease says so, or the lease has ended."""
        until_s = self.lease.until_s
        return self.fenced or self.lease.stop or (until_s is not None and now_s >= until_s)


def _number(name: str) -> float | None:
    try:
        value = float(os.environ.get(name, ""))
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def _whole(name: str) -> int | None:
    number = _number(name)
    return None if number is None else int(number)
