"""The shared memory of a GPU's LS gate, and the messages that pass it to processes.

At the LS gate, best-effort launches wait while the flag of a latency-sensitive (LS) process is set.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass

from cotenant.abi.floor import (
    FLOOR_BYTES,
    FLOOR_HOLDERS,
    FLOOR_MAGIC,
    FLOOR_VERSION,
    FloorLayout,
    FloorWordsLayout,
    RunAhead,
)
from cotenant.abi.protocol import MESSAGE_BYTES, PROTOCOL_MAGIC, PROTOCOL_VERSION, MessageType
from cotenant.agent.ipc import wire
from cotenant.policy.colocation import ColocationSettings, scheme_named


@dataclass(frozen=True)
class Joining:
    """A process's request to join an LS gate (FLOOR_JOIN). `uuid`: the GPU; `role`: a FloorRole; `wants_kernels`: the
    process can use a kernel table (work class, duration and SMs of its tenant's kernels); `wants_words`: it can use the
    wait-flag page, which FloorPage describes.
    """

    uuid: bytes
    role: int
    wants_kernels: bool
    wants_words: bool


def pack_join(uuid: bytes, role: int, *, words: bool = False) -> bytes:
    """Pack a FLOOR_JOIN message: a process asks to join an LS gate."""
    return wire.pack(MessageType.FLOOR_JOIN, {"uuid": uuid, "role": role, "wants_words": int(words)}, sequence=1)


def _is(data: bytes, kind: MessageType) -> bool:
    """Return whether the bytes are a message of this kind."""
    if len(data) != MESSAGE_BYTES:
        return False
    magic, version, found, *_ = wire.HEADER.unpack_from(data)
    return (magic, version, found) == (PROTOCOL_MAGIC, PROTOCOL_VERSION, kind)


def parse_join(data: bytes) -> Joining | None:
    """Parse a FLOOR_JOIN message; None for other messages."""
    if not _is(data, MessageType.FLOOR_JOIN):
        return None
    asked = wire.fields("floor_join", data)
    return Joining(asked["uuid"], asked["role"], asked["wants_kernels"] == 1, asked["wants_words"] == 1)


def pack_page(
    holder: int, work_class: int, work_sms: int, in_flight_us: int, kernels: int = 0, *, words: bool = False
) -> bytes:
    """Pack a FLOOR_PAGE message, which is sent with the descriptor of the gate page. `kernels`: number of entries of
    the kernel table that is sent next; `words`: whether the wait-flag page is sent, too.
    """
    reply = {"work_class": work_class, "work_sms": work_sms, "in_flight_us": in_flight_us, "kernels": kernels}
    reply["words"] = int(words)
    return wire.pack(MessageType.FLOOR_PAGE, reply, sequence=1, slot=holder)


def pack_kernels() -> bytes:
    """Pack a FLOOR_KERNELS message, which is sent with the descriptor of a kernel table."""
    return wire.pack(MessageType.FLOOR_KERNELS, sequence=1, slot=0)


def pack_words() -> bytes:
    """Pack a FLOOR_WORDS message, which is sent with the descriptor of the wait-flag page."""
    return wire.pack(MessageType.FLOOR_WORDS, sequence=1, slot=0)


def words_follow(reply: bytes) -> bool:
    """Whether a FLOOR_PAGE message says that a FLOOR_WORDS message follows."""
    return bool(wire.fields("floor_reply", reply)["words"] == 1)


def is_words(message: bytes) -> bool:
    """Whether this is a FLOOR_WORDS message."""
    return _is(message, MessageType.FLOOR_WORDS)


def holder_of(reply: bytes) -> int | None:
    """The index of the LS process's flag from a FLOOR_PAGE message; None for other messages."""
    if not _is(reply, MessageType.FLOOR_PAGE):
        return None
    head = wire.parse_head(reply)
    return head.slot if head.status == 0 else None


def _sealed(name: str) -> int:
    """Create a memfd of FLOOR_BYTES whose size is sealed."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, FLOOR_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


class FloorPage:
    """The two pages of shared memory of one GPU's LS gate, by which latency-sensitive (LS) work holds back best-effort
    work. LS processes write flags to the gate page, and best-effort processes read them. The wait-flag page has copies
    of these flags that streams of best-effort processes wait for on the GPU.
    """

    def __init__(self) -> None:
        self.fd, self.words_fd = _sealed("cotenant-floor"), _sealed("cotenant-floor-words")
        self.read_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._map = mmap.mmap(self.fd, FLOOR_BYTES)
        self.layout = FloorLayout.from_buffer(self._map)
        self._words_map = mmap.mmap(self.words_fd, FLOOR_BYTES)
        self.words = FloorWordsLayout.from_buffer(self._words_map)

    def write(self, settings: ColocationSettings, duty: float) -> None:
        """Write settings and duty cycle into the gate page; best-effort processes read them at every launch."""
        layout = self.layout
        layout.magic, layout.version = FLOOR_MAGIC, FLOOR_VERSION
        layout.page_bytes, layout.holders = FLOOR_BYTES, FLOOR_HOLDERS
        layout.in_flight_us = settings.in_flight_us
        layout.heartbeat_timeout_ms = settings.heartbeat_timeout_ms
        layout.overlap_permille = round(settings.overlap * 1000)
        layout.sm_threshold = settings.sm_threshold
        layout.duty_cycle_permille = round(duty * 1000)
        layout.run_ahead = int(RunAhead[settings.run_ahead.upper()])
        layout.scheme = int(scheme_named(settings.scheme).rule)

    def lower(self, holder: int) -> None:
        """Clear the flag of an LS process that has ended."""
        self.words.raised[holder] = self.layout.raised[holder] = self.layout.pid[holder] = 0

    def up(self, now_ns: int) -> set[int]:
        """Indices of the LS processes whose flag is set and whose heartbeat is fresh."""
        layout = self.layout
        limit_ns = layout.heartbeat_timeout_ms * 1_000_000
        return {i for i in range(FLOOR_HOLDERS) if layout.raised[i] and abs(now_ns - layout.raised_ns[i]) < limit_ns}

    def mend(self, settings: ColocationSettings, duty: float, holders: dict[int, int]) -> bool:
        """Restore the gate page's fields that belong to the agent, and clear the flags of absent processes, since an LS
        process may have written to these fields by mistake. `holders`: index -> pid of the connected LS processes.
        Returns whether a field was wrong.
        """
        layout = self.layout
        right = (layout.magic, layout.version, layout.heartbeat_timeout_ms) == (
            FLOOR_MAGIC,
            FLOOR_VERSION,
            settings.heartbeat_timeout_ms,
        )
        self.write(settings, duty)
        for index in range(FLOOR_HOLDERS):
            pid = holders.get(index, 0)
            if layout.pid[index] != pid or (not pid and layout.raised[index]):
                layout.pid[index], right = pid, False
                if not pid:
                    self.lower(index)
        return not right

    def close(self) -> None:
        """Close the descriptors of the gate page and the wait-flag page; processes keep their mappings."""
        for fd in (self.fd, self.read_fd, self.words_fd):
            os.close(fd)
