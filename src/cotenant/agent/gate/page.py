"""The floor of a GPU as a page of memory: the Python side of shim/floor.h. A test compares every offset."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass

from cotenant.agent.ipc.wire import HEADER, MAGIC, MESSAGE_BYTES, VERSION
from cotenant.policy.colocation import ColocationSettings, scheme_named

SOCKET = "floor.sock"
FLOOR_BYTES = 4096
FLOOR_MAGIC = 0x464C4F52
FLOOR_VERSION = 1
HOLDERS = 64
JOIN, PAGE, KERNELS, WORDS = 112, 113, 114, 115
LATENCY_SENSITIVE, BEST_EFFORT = 1, 2

_JOIN = struct.Struct("=16s64xIII132x")
_REPLY = struct.Struct("=IIQII200x")


class FloorLayout(ctypes.Structure):
    """struct cotenant_floor."""

    _fields_ = [
        ("magic", ctypes.c_uint32),
        ("version", ctypes.c_uint32),
        ("page_bytes", ctypes.c_uint32),
        ("holders", ctypes.c_uint32),
        ("scheme", ctypes.c_uint32),
        ("tenants", ctypes.c_uint32),
        ("interval_ns", ctypes.c_uint64),
        ("lead_ns", ctypes.c_uint64),
        ("hold_limit_ns", ctypes.c_uint64),
        ("beside_permille", ctypes.c_uint32),
        ("sm_threshold", ctypes.c_uint32),
        ("stretch_permille", ctypes.c_uint32),
        ("present", ctypes.c_uint32),
        ("check_ns", ctypes.c_uint64),
        ("duty_permille", ctypes.c_uint32),
        ("ahead_us", ctypes.c_uint32),
        ("present_words", ctypes.c_uint32),
        ("ahead_below_permille", ctypes.c_uint32),
        ("reserved_agent", ctypes.c_uint8 * 168),
        ("raised", ctypes.c_uint8 * HOLDERS),
        ("reserved_raised", ctypes.c_uint8 * 192),
        ("raised_ns", ctypes.c_uint64 * HOLDERS),
        ("raises", ctypes.c_uint64 * HOLDERS),
        ("pid", ctypes.c_uint32 * HOLDERS),
        ("reserved", ctypes.c_uint8 * 2304),
    ]


Words = ctypes.c_uint8 * HOLDERS  # struct cotenant_floor_words: who is up, as streams see it


@dataclass(frozen=True)
class Joining:
    """What a FLOOR_JOIN asks: the GPU's UUID, the role; whether the kernels' table and the second page may follow."""

    uuid: bytes
    role: int
    wants_kernels: bool
    wants_words: bool


def pack_join(uuid: bytes, role: int, *, words: bool = False) -> bytes:
    """FLOOR_JOIN."""
    head = HEADER.pack(MAGIC, VERSION, JOIN, 1, 0, 0xFFFFFFFF, 0)
    return head + _JOIN.pack(uuid, role, 0, int(words))


def parse_join(data: bytes) -> Joining | None:
    """A FLOOR_JOIN; None for anything else."""
    if len(data) != MESSAGE_BYTES:
        return None
    magic, version, kind, *_ = HEADER.unpack_from(data)
    if (magic, version, kind) != (MAGIC, VERSION, JOIN):
        return None
    uuid, role, kernels, words = _JOIN.unpack_from(data, HEADER.size)
    return Joining(uuid, role, kernels == 1, words == 1)


def pack_page(
    holder: int, work_class: int, work_sms: int, interval_ns: int, kernels: int = 0, *, words: bool = False
) -> bytes:
    """FLOOR_PAGE; the page itself travels beside it. `kernels`: entries of the table that follows; `words`: the second
    page follows, too."""
    head = HEADER.pack(MAGIC, VERSION, PAGE, 1, 0, holder, 0)
    return head + _REPLY.pack(work_class, work_sms, interval_ns, kernels, int(words))


def pack_kernels() -> bytes:
    """FLOOR_KERNELS; the table travels beside it."""
    return HEADER.pack(MAGIC, VERSION, KERNELS, 1, 0, 0, 0) + bytes(_REPLY.size)


def pack_words() -> bytes:
    """FLOOR_WORDS; the second page travels beside it."""
    return HEADER.pack(MAGIC, VERSION, WORDS, 1, 0, 0, 0) + bytes(_REPLY.size)


def words_follow(reply: bytes) -> bool:
    """Whether a FLOOR_PAGE says that FLOOR_WORDS follows."""
    return bool(_REPLY.unpack_from(reply, HEADER.size)[4] == 1)


def is_words(message: bytes) -> bool:
    """Whether that is a FLOOR_WORDS."""
    return len(message) == MESSAGE_BYTES and HEADER.unpack_from(message)[:3] == (MAGIC, VERSION, WORDS)


def holder_of(reply: bytes) -> int | None:
    """The holder's index from a FLOOR_PAGE; None for anything else."""
    if len(reply) != MESSAGE_BYTES:
        return None
    magic, version, kind, _sequence, status, slot, _ = HEADER.unpack_from(reply)
    return slot if (magic, version, kind, status) == (MAGIC, VERSION, PAGE, 0) else None


def _sealed(name: str) -> int:
    """A memfd of a page, whose size nobody changes."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, FLOOR_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


class FloorPage:
    """The agent's pages of one GPU: the first is handed out writable and read-only, the second, which streams wait for,
    writable."""

    def __init__(self) -> None:
        self.fd, self.words_fd = _sealed("cotenant-floor"), _sealed("cotenant-floor-words")
        self.read_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._map = mmap.mmap(self.fd, FLOOR_BYTES)
        self.layout = FloorLayout.from_buffer(self._map)
        self._words_map = mmap.mmap(self.words_fd, FLOOR_BYTES)
        self.words = Words.from_buffer(self._words_map)

    def write(self, settings: ColocationSettings, duty: float) -> None:
        """Put settings into force, with the duty of now; BE processes see them at their next launch."""
        layout = self.layout
        layout.magic, layout.version = FLOOR_MAGIC, FLOOR_VERSION
        layout.page_bytes, layout.holders = FLOOR_BYTES, HOLDERS
        layout.interval_ns = settings.interval_ns
        layout.lead_ns = settings.lead_ns
        layout.hold_limit_ns = settings.hold_limit_ns
        layout.beside_permille = round(settings.beside * 1000)
        layout.sm_threshold = settings.sm_threshold
        layout.stretch_permille = round(settings.stretch * 1000)
        layout.check_ns = settings.check_ns
        layout.duty_permille = round(duty * 1000)
        layout.ahead_us = settings.ahead_ns // 1000
        layout.ahead_below_permille = round(settings.ahead_below * 1000)
        layout.scheme = int(scheme_named(settings.scheme).rule)

    def lower(self, holder: int) -> None:
        """That holder has gone."""
        self.words[holder] = self.layout.raised[holder] = self.layout.pid[holder] = 0

    def up(self, now_ns: int) -> set[int]:
        """Holders that are up and believed."""
        layout = self.layout
        limit_ns = layout.hold_limit_ns
        return {i for i in range(HOLDERS) if layout.raised[i] and abs(now_ns - layout.raised_ns[i]) < limit_ns}

    def mend(self, settings: ColocationSettings, duty: float, holders: dict[int, int]) -> bool:
        """Write again what is the agent's, and clear what belongs to nobody. `holders`: index -> pid of those that are
        there. Whether something was wrong: LS processes can write, and one that does so by mistake must not last."""
        layout = self.layout
        right = (layout.magic, layout.version, layout.hold_limit_ns) == (
            FLOOR_MAGIC,
            FLOOR_VERSION,
            settings.hold_limit_ns,
        )
        self.write(settings, duty)
        for index in range(HOLDERS):
            pid = holders.get(index, 0)
            if layout.pid[index] != pid or (not pid and layout.raised[index]):
                layout.pid[index], right = pid, False
                if not pid:
                    self.lower(index)
        return not right

    def close(self) -> None:
        """Drop the descriptors; processes keep their mappings."""
        for fd in (self.fd, self.read_fd, self.words_fd):
            os.close(fd)
