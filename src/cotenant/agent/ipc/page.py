"""The page a connection shares with its process: one memfd, mapped here, passed to the shim by SCM_RIGHTS."""

from __future__ import annotations

import fcntl
import mmap
import os

from cotenant.abi.protocol import PROTOCOL_MAGIC, PROTOCOL_VERSION
from cotenant.abi.tenant_page import MAX_GPUS, PAGE_BYTES, PageLayout, SlotLayout

# written by the shim: what `counters` copies
_COUNTERS = (
    "launches",
    "copies",
    "graph_launches",
    "fences",
    "last_submit_ns",
    "predicted_busy_ns",
    "waited_ns",
    "turns",
    "contexts",
)


def counters(slot: SlotLayout) -> dict[str, int]:
    """What the shim counts in a slot, copied."""
    return {name: int(getattr(slot, name)) for name in _COUNTERS}


class Page:
    """One connection's page. The size is sealed, so a process cannot shrink it under the agent."""

    def __init__(self, connection_id: int, fail_mode: int) -> None:
        self.fd = os.memfd_create("cotenant-page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, PAGE_BYTES)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
            self._map = mmap.mmap(self.fd, PAGE_BYTES)
        except OSError:
            os.close(self.fd)
            raise
        self.layout = PageLayout.from_buffer(self._map)
        self.layout.magic = PROTOCOL_MAGIC
        self.layout.version = PROTOCOL_VERSION
        self.layout.page_bytes = PAGE_BYTES
        self.layout.slot_count = MAX_GPUS
        self.layout.fail_mode = fail_mode
        self.layout.connection_id = connection_id
        self.slots: list[SlotLayout] = [self.layout.slots[i] for i in range(MAX_GPUS)]

    def release(self) -> None:
        """Unmap: the mapping holds a descriptor of its own, and must not wait for the garbage collector."""
        self.close_fd()
        self.slots = []
        del self.layout
        del self._map

    def close_fd(self) -> None:
        """Drop the descriptor once the process has it; the mapping stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
