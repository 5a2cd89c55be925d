"""Encoding and decoding of messages between shim and agent; cotenant.abi.protocol has the layouts."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from cotenant.abi.protocol import (
    BODY_OF,
    LAYOUTS,
    MESSAGE_BYTES,
    NO_SLOT,
    PROTOCOL_MAGIC,
    PROTOCOL_VERSION,
    MessageType,
    Status,
)

_FORMATS = {name: "".join(fmt for _, fmt in fields) for name, fields in LAYOUTS.items()}
STRUCTS = {name: struct.Struct("=" + fmt) for name, fmt in _FORMATS.items()}
HEADER = STRUCTS["header"]
_NAMES = {name: [field for field, fmt in fields if not fmt.endswith("x")] for name, fields in LAYOUTS.items()}
_EMPTY_BODY = bytes(MESSAGE_BYTES - HEADER.size)


class BadMessageError(Exception):
    """A message that the protocol does not allow; `status` says why."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status


class Head(NamedTuple):
    """The header of a message between shim and agent."""

    magic: int
    version: int
    type: int
    sequence: int
    status: int
    slot: int
    sent_ns: int


def parse_head(data: bytes) -> Head:
    """Parse a message's header and check length, magic and version. Raises BadMessageError."""
    if len(data) != MESSAGE_BYTES:
        raise BadMessageError(Status.BAD_MESSAGE, f"a message must have {MESSAGE_BYTES} bytes, not {len(data)}")
    head = Head._make(HEADER.unpack_from(data))
    if head.magic != PROTOCOL_MAGIC:
        why = f"magic 0x{head.magic:08x} is not 0x{PROTOCOL_MAGIC:08x}: not a Cotenant shim"
        raise BadMessageError(Status.BAD_MESSAGE, why)
    if head.version != PROTOCOL_VERSION:
        raise BadMessageError(
            Status.BAD_VERSION,
            f"the shim has protocol version {head.version}, this agent version {PROTOCOL_VERSION}: "
            "restart the program with this agent's launcher",
        )
    return head


def body(name: str, data: bytes) -> tuple[Any, ...]:
    """Return the values of a message's body, in the order in which the message's layout in LAYOUTS lists its fields."""
    return STRUCTS[name].unpack_from(data, HEADER.size)


def fields(name: str, data: bytes) -> dict[str, Any]:
    """The values of a message by field name (slower than `body`)."""
    return dict(zip(_NAMES[name], body(name, data), strict=True))


def pack(kind: MessageType, values: dict[str, Any] | None = None, *, sequence: int = 0, slot: int = NO_SLOT,
         status: int = 0, sent_ns: int = 0) -> bytes:  # fmt: skip
    """Pack a message; fields that `values` leaves out are zero."""
    head = HEADER.pack(PROTOCOL_MAGIC, PROTOCOL_VERSION, kind, sequence, status, slot, sent_ns)
    name = BODY_OF.get(kind)
    if name is None or values is None:
        return head + _EMPTY_BODY
    blank = {"s": b""}
    given = [values.get(field, blank.get(fmt[-1], 0)) for field, fmt in LAYOUTS[name] if not fmt.endswith("x")]
    return head + STRUCTS[name].pack(*given)


_START = (PROTOCOL_MAGIC, PROTOCOL_VERSION)
_GRANT, _MEMORY = (struct.Struct("=" + _FORMATS["header"] + _FORMATS[name]) for name in ("token_grant", "memory"))


def pack_grant(sequence: int, slot: int, now_ns: int, epoch: int, deadline_ns: int, inflight_ns: int) -> bytes:
    """Pack a TOKEN_GRANT message in one step, because it is sent at every turn."""
    head = (*_START, MessageType.TOKEN_GRANT, sequence, 0, slot, now_ns)
    return _GRANT.pack(*head, epoch, deadline_ns, inflight_ns)


def pack_memory_reply(
    sequence: int, slot: int, status: int, family: int, reservation: int, size: int, used: int, limit: int
) -> bytes:
    """Pack a MEMORY_REPLY message in one step."""
    head = (*_START, MessageType.MEMORY_REPLY, sequence, status, slot, 0)
    return _MEMORY.pack(*head, family, reservation, size, used, limit)


def text_of(raw: bytes) -> str:
    """Decode a NUL-padded string of a message; unprintable characters become `?`. Raises BadMessageError without a NUL.
    """
    head, nul, _ = raw.partition(b"\0")
    if not nul:
        raise BadMessageError(Status.BAD_MESSAGE, f"a string fills all of its {len(raw)} bytes: it is too long")
    text = head.decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text)


def pack_text(kind: MessageType, code: int, text: str, *, sequence: int = 0, slot: int = NO_SLOT) -> bytes:
    """Pack an ERROR message (`code` is a Status) or a WARNING with one sentence, truncated to fit."""
    raw = text.encode()[:215].decode("utf-8", "ignore").encode()
    return pack(kind, {"code": code, "text": raw}, sequence=sequence, slot=slot, status=code)
