"""Read symbol names out of 64-bit little-endian ELF files: what a driver exports, what an object file defines."""

from __future__ import annotations

import struct
from pathlib import Path

SHT_SYMTAB, SHT_DYNSYM = 2, 11
SHN_UNDEF = 0
STB_GLOBAL, STB_WEAK = 1, 2
STT_FUNC, STT_NOTYPE, STT_GNU_IFUNC = 2, 0, 10


def defined_symbols(path: Path, *, dynamic: bool) -> list[str]:
    """Names of the global functions that an ELF file defines: its exports if `dynamic`, else its symbol table.

    Raises ValueError when the file is not a 64-bit little-endian ELF file.
    """
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path} is not a 64-bit little-endian ELF file")
    section_offset, entry_bytes, count = _section_table(data)
    wanted = SHT_DYNSYM if dynamic else SHT_SYMTAB
    names: list[str] = []
    for index in range(count):
        header = struct.unpack_from("<IIQQQQIIQQ", data, section_offset + index * entry_bytes)
        if header[1] != wanted:
            continue
        strings = struct.unpack_from("<IIQQQQIIQQ", data, section_offset + header[6] * entry_bytes)
        names += _functions(data, header[4], header[5], strings[4])
    return names


def _section_table(data: bytes) -> tuple[int, int, int]:
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    entry_bytes, count = struct.unpack_from("<HH", data, 0x3A)
    return offset, entry_bytes, count


def _functions(data: bytes, offset: int, size: int, strings: int) -> list[str]:
    names = []
    for at in range(offset, offset + size, 24):
        name, info, _, section, _, _ = struct.unpack_from("<IBBHQQ", data, at)
        if section == SHN_UNDEF or info >> 4 not in (STB_GLOBAL, STB_WEAK):
            continue
        if info & 15 in (STT_FUNC, STT_GNU_IFUNC, STT_NOTYPE):
            end = data.index(b"\0", strings + name)
            names.append(data[strings + name : end].decode())
    return names
