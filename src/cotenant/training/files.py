"""Files of a data set, of which as many stay in the page cache as the job's memory allows.

A cache that drops the oldest is of no use to training, which reads everything once per epoch before it reads anything
twice. This one keeps a fixed part and never the rest: the share of hits is the share that fits, as profiles assume.
Which files stay follows from their names, so worker processes need not agree on anything.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

BESIDE_BYTES = 0.1  # part of the memory that is left to the program when it has not been measured yet


class CachedFiles:
    """A data set of whole files: item i is the bytes of file i. To be given to a DataLoader, or wrapped by a data set
    that decodes (as its `.dataset`).

    The loop tells it how much memory the job has (`set_memory_budget`); what the process itself needs is taken off.
    Reading a file that is not among those kept puts it out of the page cache again.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.paths = [str(path) for path in paths]
        self._sizes = [os.stat(path).st_size for path in self.paths]
        self._places = [_place(path) for path in self.paths]
        self._below = 1.0  # files whose place is below this stay
        self.budget_bytes: int | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> bytes:
        descriptor = os.open(self.paths[index], os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read()
            if not self.stays(index):
                os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        return content

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self._sizes)

    def stays(self, index: int) -> bool:
        """Whether a file is among those kept in the page cache."""
        return self._places[index] < self._below

    def kept_bytes(self) -> int:
        """Bytes of the files that are kept."""
        return sum(size for size, place in zip(self._sizes, self._places, strict=True) if place < self._below)

    def set_memory_budget(self, memory_bytes: int) -> None:
        """Keep as much as fits beside the process itself; those that no longer fit leave the cache at once."""
        self.budget_bytes = max(0, memory_bytes - _resident_bytes(memory_bytes))
        before, self._below = self._below, self._threshold(self.budget_bytes)
        for path, place in zip(self.paths, self._places, strict=True):
            if self._below <= place < before:
                _drop(path)

    def _threshold(self, budget_bytes: int) -> float:
        """The largest place below which the files fit, in the order of places."""
        held = 0
        for place, size in sorted(zip(self._places, self._sizes, strict=True)):
            if held + size > budget_bytes:
                return place
            held += size
        return 1.0


def _place(path: str) -> float:
    """A number in [0, 1) from a file's name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=6).digest(), "big") / 2**48


def _drop(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return  # it is gone, and with it its pages
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _resident_bytes(memory_bytes: int) -> int:
    """Memory of this process that is not page cache; a part of the whole where the system does not tell."""
    try:
        fields = Path("/proc/self/status").read_text().split("RssAnon:")[1].split()
        return int(fields[0]) * 1024
    except (OSError, IndexError, ValueError):
        return int(memory_bytes * BESIDE_BYTES)
