"""Regions of the system's shared memory that clients register, so that tensors need not be sent.

They are accessed by file reads and writes: a mapped region that a client shrinks would crash the server.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import FileIO
from typing import Any

from cotenant.serving.protocol.tensors import Buffer, TensorError

FOLDER = "/dev/shm"
MOST_REGIONS = 1024


@dataclass(frozen=True)
class Region:
    """A region of shared memory. `key` is the POSIX name of the memory object; the region is `byte_size` bytes of it
    from `offset` on.
    """

    name: str
    key: str
    offset: int
    byte_size: int
    # a file object, so that the file is closed when no request uses it any more
    file: FileIO = field(repr=False, compare=False)

    def status(self) -> dict[str, Any]:
        """Return the description of the region for the answer to the protocol's status request."""
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.byte_size}


@dataclass(frozen=True)
class Place:
    """The part of a region of shared memory that holds one tensor."""

    region: Region
    offset: int
    size: int

    def read(self) -> bytes:
        """Read the bytes of the tensor from the region."""
        data = os.pread(self.region.file.fileno(), self.size, self.region.offset + self.offset)
        if len(data) != self.size:
            raise TensorError(f"shared memory region {self.region.name!r} has become smaller than it was registered")
        return data

    def write(self, name: str, data: Buffer) -> dict[str, Any]:
        """Write an output into the region. Returns the parameters that tell the client where it is."""
        if len(data) > self.size:
            raise TensorError(f"output {name!r} has {len(data)} bytes, but its shared memory only {self.size}")
        if os.pwrite(self.region.file.fileno(), data, self.region.offset + self.offset) != len(data):
            raise TensorError(f"shared memory region {self.region.name!r} cannot be written")
        found = {"shared_memory_region": self.region.name, "shared_memory_byte_size": len(data)}
        return found | ({"shared_memory_offset": self.offset} if self.offset else {})


class Regions:
    """All registered regions, by name. `allowed`: whether clients may use this machine's memory."""

    def __init__(self, allowed: bool = True) -> None:
        self.allowed = allowed
        self._regions: dict[str, Region] = {}

    def status(self, name: str = "") -> list[dict[str, Any]]:
        """All regions, or the named one. Raises TensorError if that is not registered."""
        if name and name not in self._regions:
            raise TensorError(f"shared memory region {name[:200]!r} is not registered")
        return [region.status() for region in self._regions.values() if name in ("", region.name)]

    def register(self, name: str, key: Any, offset: Any, byte_size: Any) -> None:
        """Register a region."""
        if not self.allowed:
            what = "shared memory needs a server that listens on this machine only, or has tokens"
            raise TensorError(what)
        if name in self._regions:
            raise TensorError(f"shared memory region {name[:200]!r} is already registered")
        if len(self._regions) >= MOST_REGIONS:
            raise TensorError(f"there are already {MOST_REGIONS} shared memory regions, the most that are allowed")
        inner = key.removeprefix("/") if isinstance(key, str) else ""
        if not inner or "/" in inner or "\0" in inner or inner in (".", "..") or len(inner) > 255:
            raise TensorError("key must be the name of a shared memory object, /NAME")
        if not all(type(x) is int and 0 <= x < 1 << 62 for x in (offset, byte_size)) or byte_size == 0:
            raise TensorError("offset and byte_size must be numbers of bytes, byte_size above 0")
        try:
            fd = os.open(f"{FOLDER}/{inner}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise TensorError(f"shared memory object {key!r} cannot be opened: {why}") from None
        file = FileIO(fd, "r+")
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size < offset + byte_size:
            raise TensorError(f"shared memory object {key!r} has {found.st_size} bytes, not {offset + byte_size}")
        self._regions[name] = Region(name, key, offset, byte_size, file)

    def unregister(self, name: str = "") -> None:
        """Unregister a region of shared memory, or all regions; the name of an unknown region is ignored."""
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def place(self, name: str, parameters: Mapping[str, Any]) -> Place | None:
        """Where a tensor is in shared memory, from its parameters; None if the tensor is part of the message. Raises
        TensorError if that place is not within a region.
        """
        region = parameters.get("shared_memory_region")
        if region is None:
            return None
        known = self._regions.get(region) if isinstance(region, str) else None
        if known is None:
            raise TensorError(f"tensor {name!r}: shared memory region {str(region)[:200]!r} is not registered")
        size, offset = parameters.get("shared_memory_byte_size", -1), parameters.get("shared_memory_offset", 0)
        if not all(type(x) is int and x >= 0 for x in (size, offset)) or offset + size > known.byte_size:
            what = f"is not within shared memory region {region!r} of {known.byte_size} bytes"
            raise TensorError(f"tensor {name!r} {what}")
        return Place(known, offset, size)
