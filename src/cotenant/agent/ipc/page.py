"""The shared page of a connection: a memfd that both the agent and the shim in the tenant's process map.

It has a slot for each GPU, in which the shim writes counters and the agent says whether the process may launch. The
agent passes the memfd to the shim by SCM_RIGHTS.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from cotenant.abi.protocol import PROTOCOL_MAGIC, PROTOCOL_VERSION
from cotenant.abi.tenant_page import MAX_GPUS, PAGE_BYTES, PageLayout, SlotLayout

# counters that the shim writes and that `counters` returns
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
    """Copy the counters that the shim has written into a slot."""
    return {name: int(getattr(slot, name)) for name in _COUNTERS}


class Page:
    """The shared page of one connection. Its size is sealed, so a process cannot shrink the memory that the agent maps.
    """

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
        """Unmap the page now: the mapping holds a descriptor, which must not wait for the garbage collector."""
        self.close_fd()
        self.slots = []
        del self.layout
        del self._map

    def close_fd(self) -> None:
        """Close the page's descriptor after the process received it; the page stays mapped."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
