"""Definitions of HTTP/2 that clients and servers share: numbers, frames, header literals (RFC 9113, RFC 7541)."""

from __future__ import annotations

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
PROTOCOL_ERROR = 1
FIRST_WINDOW, MOST_WINDOW = 65_535, (1 << 31) - 1
FRAME_HEAD = struct.Struct(">HBBBI")  # the parts of a frame's head: length (16 and 8 bits), type, flags, stream


class ProtocolError(ValueError):
    """Raised if the peer violates the protocol. The connection then ends with the error code `code`."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes | bytearray | memoryview = b"") -> bytes:
    """Encode one frame: its head, then its payload."""
    size = len(payload)
    return FRAME_HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """Encode an HTTP/2 header as a literal that is not added to the peer's table, without Huffman coding (RFC 7541,
    6.2.2).
    """
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _length(size: int) -> bytes:
    if size < 127:
        return bytes((size,))
    out, size = bytearray((127,)), size - 127
    while size >= 128:
        out.append(size & 127 | 128)
        size >>= 7
    out.append(size)
    return bytes(out)


def unpadded(flags: int, payload: bytes) -> bytes:
    """Return the payload of a DATA or HEADERS frame without its padding (RFC 9113, 6.1). Raises ProtocolError if the
    padding is longer than the frame.
    """
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ProtocolError(PROTOCOL_ERROR, "the padding is longer than the frame")
    return payload[1 : len(payload) - payload[0]]
