"""The page a connection shares with its process: one memfd, mapped here, passed to the shim by SCM_RIGHTS."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from cotenant.agent.ipc import wire

_SLOT_FIELDS: list[tuple[str, type]] = [
    ("epoch", ctypes.c_uint64),
    ("deadline_ns", ctypes.c_uint64),
    ("inflight_allowed_ns", ctypes.c_uint64),
    ("idle_release_ns", ctypes.c_uint64),
    ("drain_timeout_ns", ctypes.c_uint64),
    ("memory_limit_bytes", ctypes.c_uint64),
    ("memory_used_bytes", ctypes.c_uint64),
    ("flags", ctypes.c_uint32),
    ("reserved_0", ctypes.c_uint32),
    ("uuid", ctypes.c_uint8 * 16),
    ("reserved_1", ctypes.c_uint64),
    ("memory_kept_bytes", ctypes.c_uint64),
    ("floor_parts", ctypes.c_uint64),
    ("reserved_agent", ctypes.c_uint8 * 24),
    ("epoch_seen", ctypes.c_uint64),
    ("calls_in_flight", ctypes.c_uint64),
    ("launches", ctypes.c_uint64),
    ("copies", ctypes.c_uint64),
    ("graph_launches", ctypes.c_uint64),
    ("fences", ctypes.c_uint64),
    ("last_submit_ns", ctypes.c_uint64),
    ("predicted_busy_ns", ctypes.c_uint64),
    ("waited_ns", ctypes.c_uint64),
    ("turns", ctypes.c_uint64),
    ("contexts", ctypes.c_uint64),
    ("floor_ns", ctypes.c_uint64),
    ("reserved_shim", ctypes.c_uint8 * 32),
]
# written by the shim: what `snapshot` copies
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


class Slot(ctypes.Structure):
    """struct cotenant_slot. Each 8-byte field is written with one aligned store."""

    _fields_ = _SLOT_FIELDS
    epoch: int
    deadline_ns: int
    inflight_allowed_ns: int
    idle_release_ns: int
    drain_timeout_ns: int
    memory_limit_bytes: int
    memory_kept_bytes: int
    memory_used_bytes: int
    flags: int
    floor_parts: int
    floor_ns: int
    launches: int
    waited_ns: int

    def counters(self) -> dict[str, int]:
        """What the shim counts, copied."""
        return {name: int(getattr(self, name)) for name in _COUNTERS}


class PageLayout(ctypes.Structure):
    """struct cotenant_page."""

    _fields_ = [
        ("magic", ctypes.c_uint32),
        ("version", ctypes.c_uint32),
        ("page_bytes", ctypes.c_uint32),
        ("slot_count", ctypes.c_uint32),
        ("fail_mode", ctypes.c_uint32),
        ("reserved_0", ctypes.c_uint32),
        ("connection_id", ctypes.c_uint64),
        ("reserved", ctypes.c_uint8 * 224),
        ("slots", Slot * wire.MAX_GPUS),
    ]
    slots: ctypes.Array[Slot]


class Page:
    """One connection's page. The size is sealed, so a process cannot shrink it under the agent."""

    def __init__(self, connection_id: int, fail_mode: int) -> None:
        self.fd = os.memfd_create("cotenant-page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, wire.PAGE_BYTES)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
            self._map = mmap.mmap(self.fd, wire.PAGE_BYTES)
        except OSError:
            os.close(self.fd)
            raise
        self.layout = PageLayout.from_buffer(self._map)
        self.layout.magic = wire.MAGIC
        self.layout.version = wire.VERSION
        self.layout.page_bytes = wire.PAGE_BYTES
        self.layout.slot_count = wire.MAX_GPUS
        self.layout.fail_mode = fail_mode
        self.layout.connection_id = connection_id
        self.slots: list[Slot] = [self.layout.slots[i] for i in range(wire.MAX_GPUS)]

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
