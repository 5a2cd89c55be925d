"""The copy page of a GPU: shared memory through which the tenants' processes schedule copies over the PCIe link.

This is the agent's side: it creates the page, assigns queues and reads counters.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Mapping

from cotenant.abi.copy_page import (
    COPY_LINKS,
    COPY_MAGIC,
    COPY_PAGE_BYTES,
    COPY_QUEUES,
    COPY_SLOTS,
    COPY_VERSION,
    CopyLinkLayout,
    CopyPageLayout,
    CopyRank,
)
from cotenant.policy.copies import CopySettings

DIRECTIONS = ("to_device", "to_host")
HEADER_BYTES = ctypes.sizeof(CopyPageLayout) - COPY_LINKS * ctypes.sizeof(CopyLinkLayout)


class CopyPage:
    """One GPU's copy page: a memfd whose size is sealed, so that no process can shrink it."""

    def __init__(self, settings: CopySettings) -> None:
        self.fd = os.memfd_create("cotenant-copies", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, COPY_PAGE_BYTES)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._map = mmap.mmap(self.fd, COPY_PAGE_BYTES)
        except OSError:
            os.close(self.fd)
            raise
        self.layout = CopyPageLayout.from_buffer(self._map)
        self.configure(settings)
        self._name()

    def _name(self) -> None:
        self.layout.page_bytes = COPY_PAGE_BYTES
        self.layout.version = COPY_VERSION
        self.layout.magic = COPY_MAGIC

    def put_right(self, settings: CopySettings, queues: Mapping[int, tuple[float, CopyRank]]) -> bool:
        """Rewrite the fields of the page that belong to the agent, and return whether a process had overwritten any.

        `queues`: weight and rank of each assigned queue, by the queue's number. Fields that the processes write are not
        restored. A wrong value there does not stop copies for long: a waiting queue counts for `wait_lapse_ns`, and the
        slot of a chunk in flight for `slot_lapse_ns`.
        """
        layout = self.layout
        before = bytes(memoryview(self._map)[:HEADER_BYTES])
        self.configure(settings)
        self._name()
        wrong = bytes(memoryview(self._map)[:HEADER_BYTES]) != before
        for number in range(COPY_QUEUES):
            weight, rank = queues.get(number, (0.0, CopyRank.NORMAL))
            wanted = (round(weight * 1000), int(rank))
            rows = [link.queues[number] for link in layout.links]
            if any((row.weight_milli, row.rank if weight else int(rank)) != wanted for row in rows):
                self.describe(number, weight, rank)
                wrong = True
        return wrong

    def configure(self, settings: CopySettings) -> None:
        """Write the settings of copy scheduling into the copy page; processes read them at every copy."""
        sizes = ("chunk_bytes", "period_bytes", "slice_bytes", "alone_bytes")
        for name in ("in_flight", *sizes, "wait_lapse_ns", "slot_lapse_ns"):
            setattr(self.layout, name, getattr(settings, name))

    def describe(self, queue: int, weight: float, rank: CopyRank) -> None:
        """Set the weight and rank of a tenant's queue on all links. Weight 0 means that no tenant has the queue."""
        for link in self.layout.links:
            link.queues[queue].rank = int(rank)
            link.queues[queue].weight_milli = round(weight * 1000)

    def clear(self, queue: int) -> None:
        """Reset a queue for a new tenant: the queue starts at the link's current virtual time."""
        for link in self.layout.links:
            row = link.queues[queue]
            row.seen_ns = row.active_ns = row.bytes = row.chunks = row.waited_ns = row.small = 0
            row.vruntime = link.min_vruntime

    def drop(self, queue: int, participant: int, last: bool) -> None:
        """Free the slots of a process that has ended; each slot is a chunk in flight. `participant`: the process's
        number on the copy page. `last`: it was the tenant's last process, so that the queue no longer waits.
        """
        for link in self.layout.links:
            for index in range(COPY_SLOTS):
                if link.slots[index] >> 48 == participant:
                    link.slots[index] = 0
            if last:
                link.queues[queue].seen_ns = 0

    def counters(self, queue: int) -> dict[str, dict[str, float]]:
        """Return the counters of a tenant's queue (bytes, chunks, small copies, seconds waited) by direction of the
        copies.
        """
        found: dict[str, dict[str, float]] = {}
        for number, name in enumerate(DIRECTIONS):
            rows = [self.layout.links[at].queues[queue] for at in range(number, COPY_LINKS, len(DIRECTIONS))]
            found[name] = {
                "bytes": sum(row.bytes for row in rows),
                "chunks": sum(row.chunks for row in rows),
                "small_copies": sum(row.small for row in rows),
                "waited_s": sum(row.waited_ns for row in rows) / 1e9,
            }
        return found

    def close(self) -> None:
        """Unmap and close the copy page; processes keep their own mappings of it."""
        del self.layout
        self._map.close()
        os.close(self.fd)
