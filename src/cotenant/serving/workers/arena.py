"""Memory shared by the gateway and one worker: a memfd mapped by both. A worker has one batch at a time, so the batch's
inputs start at 0, its outputs follow, and nothing needs to be allocated or freed.
"""

from __future__ import annotations

import mmap
import os

ALIGN = 64
LEAST = 1 << 20


def aligned(offset: int) -> int:
    """Return the next offset in the shared memory that is aligned well enough for an array of any type."""
    return (offset + ALIGN - 1) & ~(ALIGN - 1)


class Arena:
    """One mapping of the shared memory; it grows when either side needs more."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map()

    @classmethod
    def create(cls, name: str) -> Arena:
        """Create an arena; the side (gateway or worker) that creates it owns it."""
        fd = os.memfd_create(f"cotenant-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, LEAST)
        return cls(fd)

    def _map(self) -> None:
        # the old mapping stays valid until no view of it is left
        self.size = os.fstat(self.fd).st_size
        self.map = mmap.mmap(self.fd, self.size)
        self.view = memoryview(self.map)

    def reach(self, size: int) -> None:
        """Ensure that `size` bytes are mapped, growing the memory if necessary."""
        if size <= self.size:
            return
        if os.fstat(self.fd).st_size < size:
            os.ftruncate(self.fd, max(size, 2 * self.size))
        self._map()

    def close(self) -> None:
        """Close this side's descriptor; the mapping is freed with its last view."""
        os.close(self.fd)
