"""Pickled messages between a process and its helpers: 8 bytes of length, then the pickle."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import asyncio

_LENGTH = struct.Struct("<Q")


def frame(message: object) -> bytes:
    """Encode a message: the length of its pickle, then the pickle."""
    data = pickle.dumps(message)
    return _LENGTH.pack(len(data)) + data


def read(stream: BinaryIO) -> Any:
    """Read the next pickled message. Raises EOFError at the end of the stream."""
    return pickle.loads(_exactly(stream, _LENGTH.unpack(_exactly(stream, _LENGTH.size))[0]))


def _exactly(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError
    return data


async def receive(stream: asyncio.StreamReader) -> Any:
    """Read the next message. Raises asyncio.IncompleteReadError (an EOFError) at the end of the stream."""
    (length,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
    return pickle.loads(await stream.readexactly(length))


def take_streams() -> tuple[BinaryIO, Callable[[object], None]]:
    """Return standard input, and a function that writes a message to standard output; other output goes to standard
    error.
    """
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def write(message: object) -> None:
        sink.write(frame(message))
        sink.flush()

    return source, write
