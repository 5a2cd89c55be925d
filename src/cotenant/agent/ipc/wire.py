"""Python side of shim/protocol.h: message layouts and constants. A test compares every offset."""

from __future__ import annotations

import enum
import struct
from typing import Any, NamedTuple

MAGIC = 0x434F5445
VERSION = 1
MESSAGE_BYTES = 256
PAGE_BYTES = 8192
MAX_GPUS = 16
NO_SLOT = 0xFFFFFFFF
NO_LIMIT = NO_DEADLINE = 2**64 - 1


class Type(enum.IntEnum):
    """enum cotenant_message_type."""

    HELLO = 1
    GPU_ATTACH = 2
    TOKEN_REQUEST = 3
    TOKEN_RELEASE = 4
    MEMORY_RESERVE = 5
    MEMORY_COMMIT = 6
    MEMORY_RELEASE = 7
    MEMORY_QUERY = 8
    MEMORY_STATE = 9
    BURST_REPORT = 10
    WARNING = 11
    GOODBYE = 12
    COPY_ATTACH = 13
    HELLO_REPLY = 64
    GPU_REPLY = 65
    TOKEN_GRANT = 66
    TOKEN_REVOKE = 67
    MEMORY_REPLY = 68
    PAGE_UPDATE = 69
    ERROR = 70
    COPY_REPLY = 71
    MOVE_STATE = 80
    MOVE_ROOM = 81
    MOVE_PROGRESS = 82
    MOVE_DONE = 83
    MOVE_BACKING = 84
    MOVE_OUT = 88
    MOVE_IN = 89
    MOVE_ALLOW = 90
    MOVE_ROOM_REPLY = 91
    MOVE_BACKING_REPLY = 92


class Status(enum.IntEnum):
    """enum cotenant_status."""

    OK = 0
    BAD_MESSAGE = 1
    BAD_VERSION = 2
    UNKNOWN_TENANT = 3
    DENIED = 4
    OUT_OF_MEMORY = 5
    UNKNOWN_GPU = 6
    TOO_MANY = 7
    SHUTTING_DOWN = 8
    INTERNAL = 9


class Family(enum.IntEnum):
    """enum cotenant_memory_family: what memory was taken for."""

    PLAIN = 1
    MANAGED = 2
    ARRAY = 3
    POOL = 4
    VMM = 5
    GRAPH = 6
    CONTEXT = 7
    HOST = 8


class Oversubscribe(enum.IntEnum):
    """enum cotenant_oversubscribe."""

    NONE = 0
    SWAP = 1
    MANAGED = 2
    PARK = 3


class MoveFlag(enum.IntFlag):
    """enum cotenant_move_flags."""

    FIXED = 1
    STOP = 2
    NOW = 4
    CONTEXT = 8
    HAND = 16


class FailMode(enum.IntEnum):
    """enum cotenant_fail_mode."""

    CLOSED = 0
    OPEN = 1


class Reason(enum.IntEnum):
    """enum cotenant_release_reason."""

    DEADLINE = 1
    REVOKED = 2
    IDLE = 3
    EXIT = 4


class SlotFlag(enum.IntFlag):
    """enum cotenant_slot_flags."""

    ATTACHED = 1
    CONTENDED = 2
    UNGATED = 4
    UNFENCED = 8
    BEST_EFFORT = 16
    HOLDS_FLOOR = 32
    COPIES = 256


class Warn(enum.IntEnum):
    """enum cotenant_warning_code."""

    NO_LAUNCH_SEEN = 1
    NOT_INTERCEPTED = 2
    DRAIN_TIMEOUT = 3
    OVER_LIMIT = 4
    NOT_MOVABLE = 8
    NO_FLOOR = 16


# Field name and struct format, in order; "_" pads. The names are those of the C structs.
LAYOUTS: dict[str, tuple[tuple[str, str], ...]] = {
    "header": (
        ("magic", "I"),
        ("version", "H"),
        ("type", "H"),
        ("sequence", "Q"),
        ("status", "I"),
        ("slot", "I"),
        ("sent_ns", "Q"),
    ),
    "hello": (
        ("pid", "I"),
        ("flags", "I"),
        ("start_time_ticks", "Q"),
        ("driver_version", "I"),
        ("shim_version", "I"),
        ("token", "64s"),
        ("program", "64s"),
        ("reserved", "72x"),
    ),
    "hello_reply": (
        ("connection_id", "Q"),
        ("fail_mode", "I"),
        ("reconnect_ms", "I"),
        ("tenant", "64s"),
        ("oversubscribe", "I"),
        ("reserved_0", "4x"),
        ("reserved", "136x"),
    ),
    "gpu_attach": (
        ("uuid", "16s"),
        ("total_bytes", "Q"),
        ("free_bytes", "Q"),
        ("ordinal", "I"),
        ("sm_count", "I"),
        ("name", "64s"),
        ("reserved", "120x"),
    ),
    "token_request": (
        ("burst_ns", "Q"),
        ("gap_ns", "Q"),
        ("waiting_since_ns", "Q"),
        ("gang_mask", "I"),
        ("threads_waiting", "I"),
        ("reserved", "192x"),
    ),
    "token_release": (
        ("epoch", "Q"),
        ("used_ns", "Q"),
        ("overuse_ns", "Q"),
        ("first_submit_ns", "Q"),
        ("drained_ns", "Q"),
        ("launches", "Q"),
        ("copies", "Q"),
        ("burst_ns", "Q"),
        ("gap_ns", "Q"),
        ("reason", "I"),
        ("drained", "I"),
        ("wants_more", "I"),
        ("reserved_0", "4x"),
        ("reserved", "136x"),
    ),
    "token_grant": (
        ("epoch", "Q"),
        ("deadline_ns", "Q"),
        ("inflight_allowed_ns", "Q"),
        ("reserved", "200x"),
    ),
    "token_revoke": (("epoch", "Q"), ("reserved", "216x")),
    "memory": (
        ("family", "I"),
        ("reserved_0", "4x"),
        ("reservation", "Q"),
        ("bytes", "Q"),
        ("used_bytes", "Q"),
        ("limit_bytes", "Q"),
        ("reserved", "184x"),
    ),
    "text": (("code", "I"), ("reserved_0", "4x"), ("text", "216s")),
    "burst": (("burst_ns", "Q"), ("gap_ns", "Q"), ("reserved", "208x")),
    "copies": (
        ("queue", "I"),
        ("participant", "I"),
        ("page_bytes", "I"),
        ("reserved_0", "4x"),
        ("reserved", "208x"),
    ),
    "move": (
        ("bytes", "Q"),
        ("base", "Q"),
        ("span_bytes", "Q"),
        ("resident_bytes", "Q"),
        ("away_bytes", "Q"),
        ("backing_bytes", "Q"),
        ("pinned_bytes", "Q"),
        ("backing_low", "Q"),
        ("backing_high", "Q"),
        ("elapsed_ns", "Q"),
        ("flags", "I"),
        ("reserved_0", "4x"),
        ("piece_bytes", "Q"),
        ("mapping_ns", "Q"),
        ("copying_ns", "Q"),
        ("handed_bytes", "Q"),
        ("reserved", "104x"),
    ),
}

STRUCTS: dict[str, struct.Struct] = {
    name: struct.Struct("=" + "".join(fmt for _, fmt in fields)) for name, fields in LAYOUTS.items()
}
HEADER = STRUCTS["header"]
BODY_OF: dict[int, str] = {
    Type.HELLO: "hello",
    Type.GPU_ATTACH: "gpu_attach",
    Type.TOKEN_REQUEST: "token_request",
    Type.TOKEN_RELEASE: "token_release",
    Type.MEMORY_RESERVE: "memory",
    Type.MEMORY_COMMIT: "memory",
    Type.MEMORY_RELEASE: "memory",
    Type.MEMORY_QUERY: "memory",
    Type.MEMORY_STATE: "memory",
    Type.BURST_REPORT: "burst",
    Type.WARNING: "text",
    Type.GOODBYE: "text",
    Type.HELLO_REPLY: "hello_reply",
    Type.TOKEN_GRANT: "token_grant",
    Type.TOKEN_REVOKE: "token_revoke",
    Type.MEMORY_REPLY: "memory",
    Type.ERROR: "text",
    Type.COPY_REPLY: "copies",
    Type.MOVE_STATE: "move",
    Type.MOVE_ROOM: "move",
    Type.MOVE_PROGRESS: "move",
    Type.MOVE_DONE: "move",
    Type.MOVE_OUT: "move",
    Type.MOVE_IN: "move",
    Type.MOVE_ALLOW: "move",
    Type.MOVE_ROOM_REPLY: "move",
    Type.MOVE_BACKING: "move",
    Type.MOVE_BACKING_REPLY: "move",
}
_NAMES = {name: [f for f, fmt in fields if not fmt.endswith("x")] for name, fields in LAYOUTS.items()}
_EMPTY_BODY = bytes(MESSAGE_BYTES - HEADER.size)
_BODY_OFFSET = HEADER.size


class BadMessageError(Exception):
    """A message that the protocol does not allow; `status` says which way."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status


class Head(NamedTuple):
    """The header of a message."""

    magic: int
    version: int
    type: int
    sequence: int
    status: int
    slot: int
    sent_ns: int


def parse_head(data: bytes) -> Head:
    """Check length, magic and version; BadMessageError says what is wrong."""
    if len(data) != MESSAGE_BYTES:
        raise BadMessageError(Status.BAD_MESSAGE, f"a message has {MESSAGE_BYTES} bytes; {len(data)} came")
    head = Head._make(HEADER.unpack_from(data))
    if head.magic != MAGIC:
        raise BadMessageError(Status.BAD_MESSAGE, f"magic 0x{head.magic:08x} is not 0x{MAGIC:08x}: not a Cotenant shim")
    if head.version != VERSION:
        raise BadMessageError(
            Status.BAD_VERSION,
            f"the shim speaks protocol version {head.version}, this agent version {VERSION}: start the program again"
            " with the launcher of this agent",
        )
    return head


def body(name: str, data: bytes) -> tuple[Any, ...]:
    """Values of a message's body in the order of LAYOUTS, padding left out."""
    return STRUCTS[name].unpack_from(data, _BODY_OFFSET)


def fields(name: str, data: bytes) -> dict[str, Any]:
    """The same by name (not for hot paths)."""
    return dict(zip(_NAMES[name], body(name, data), strict=True))


def pack(kind: Type, values: dict[str, Any] | None = None, *, sequence: int = 0, slot: int = NO_SLOT, status: int = 0,
         sent_ns: int = 0) -> bytes:  # fmt: skip
    """A message; fields that `values` leaves out are zero."""
    head = HEADER.pack(MAGIC, VERSION, kind, sequence, status, slot, sent_ns)
    name = BODY_OF.get(kind)
    if name is None or values is None:
        return head + _EMPTY_BODY
    blank = {"s": b""}
    given = [values.get(field, blank.get(fmt[-1], 0)) for field, fmt in LAYOUTS[name] if not fmt.endswith("x")]
    return head + STRUCTS[name].pack(*given)


_GRANT = struct.Struct("=IHHQIIQQQQ200x")
_MEMORY = struct.Struct("=IHHQIIQI4xQQQQ184x")


def pack_grant(sequence: int, slot: int, now_ns: int, epoch: int, deadline_ns: int, inflight_ns: int) -> bytes:
    """TOKEN_GRANT, packed in one step: the message of the hot path."""
    return _GRANT.pack(MAGIC, VERSION, 66, sequence, 0, slot, now_ns, epoch, deadline_ns, inflight_ns)


def pack_memory_reply(
    sequence: int, slot: int, status: int, family: int, reservation: int, size: int, used: int, limit: int
) -> bytes:
    """MEMORY_REPLY, packed in one step."""
    return _MEMORY.pack(MAGIC, VERSION, 68, sequence, status, slot, 0, family, reservation, size, used, limit)


def text_of(raw: bytes) -> str:
    """A NUL-padded string of a message. BadMessageError when it has no NUL or is not UTF-8 that one can print."""
    head, nul, _ = raw.partition(b"\0")
    if not nul:
        raise BadMessageError(Status.BAD_MESSAGE, f"a string fills all of its {len(raw)} bytes: it is too long")
    text = head.decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text)


def pack_text(kind: Type, code: int, text: str, *, sequence: int = 0, slot: int = NO_SLOT) -> bytes:
    """ERROR (code is a Status) or WARNING with one sentence, cut to what fits."""
    raw = text.encode()[:215].decode("utf-8", "ignore").encode()
    return pack(kind, {"code": code, "text": raw}, sequence=sequence, slot=slot, status=code)
