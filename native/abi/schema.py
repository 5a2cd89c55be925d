"""The schema of what C and Python share: one TOML file for each header, which is read and checked here.

A constant is [name, type, value, meaning]; a message is [name, number, body, sender, meaning]; a value of an enum is
[name, number, meaning]; a field of a struct is [name, type, meaning], and a bare string is a heading between fields.
Types are u8, u16, u32, u64, i32, i64, bool, a struct of the same file, any of them with [count] or [CONSTANT], and "to
N", which means zeros up to offset N. Zeros after the last field fill the struct up to its `bytes`. There is no hidden
padding: every field lies at a multiple of its size, so if the compiler finds the right size of a struct, all its
offsets are right. Names end with their unit (_ns, _bytes, _permille); fields whose names begin with "reserved" are
zero. `kind` of a struct: Python's struct module packs a "message" and a "row" (of a table); a "page" (which is mapped)
and a "value" (which is passed to C) are a ctypes.Structure. `c_only` names constants and enums that only C reads, so
that the Python module does not have them.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

# name of a type -> its bytes, type in C, type in ctypes, and format of the struct module
SCALARS: dict[str, tuple[int, str, str, str]] = {
    "u8": (1, "uint8_t", "c_uint8", "B"),
    "u16": (2, "uint16_t", "c_uint16", "H"),
    "u32": (4, "uint32_t", "c_uint32", "I"),
    "u64": (8, "uint64_t", "c_uint64", "Q"),
    "i32": (4, "int32_t", "c_int32", "i"),
    "i64": (8, "int64_t", "c_int64", "q"),
    "bool": (1, "bool", "c_bool", "?"),
}
UNITS = {
    "ns": "ns",
    "us": "us",
    "ms": "ms",
    "bytes": "bytes",
    "permille": "1/1000",
    "milli": "1/1000",
    "ticks": "ticks",
}


class SchemaError(Exception):
    """The schema is inconsistent."""


@dataclass(frozen=True)
class Field:
    """A field and its place in the struct. `count`: number of elements, None if the field is not an array; `heading`:
    the heading before the field."""

    name: str
    type: str
    count: int | None
    count_text: str
    offset: int
    bytes: int
    meaning: str
    heading: str = ""

    @property
    def reserved(self) -> bool:
        """Whether the field only fills space."""
        return self.name.startswith("reserved")

    @property
    def unit(self) -> str:
        """The unit, which is the last part of the name."""
        return "" if self.reserved else UNITS.get(self.name.rsplit("_", 1)[-1], "")


@dataclass(frozen=True)
class Struct:
    """A struct with all its fields, including those that only fill space."""

    name: str
    kind: str
    bytes: int
    align: int
    meaning: str
    fields: tuple[Field, ...]


@dataclass(frozen=True)
class Schema:
    """One schema file."""

    stem: str
    raw: dict[str, Any]
    structs: tuple[Struct, ...]

    @property
    def macro(self) -> str:
        """Prefix of the constants in C."""
        return str(self.raw["macro_prefix"])

    @property
    def tag(self) -> str:
        """Prefix of the structs in C."""
        return str(self.raw["struct_prefix"])

    @property
    def enums(self) -> list[dict[str, Any]]:
        """The enums; MessageType comes first if the file has messages."""
        messages = [[name, number, meaning] for name, number, _, _, meaning in self.raw.get("messages", [])]
        first = {
            "name": "MessageType",
            "macro_prefix": "",
            "meaning": "Types of the messages between processes and the agent; the field `type` of a header has one",
            "values": messages,
        }
        return ([first] if messages else []) + list(self.raw.get("enum", []))


# -- reading -----------------------------------------------------------------------------------------------------------


def read(stem: str) -> Schema:
    """Read and check a schema file."""
    raw = tomllib.loads((HERE / f"{stem}.toml").read_text())
    numbers = {name: value for name, kind, value, _ in raw.get("constants", []) if kind != "string"}
    known: dict[str, Struct] = {}
    for entry in raw.get("struct", []):
        known[entry["name"]] = _struct(entry, numbers, known)
    schema = Schema(stem, raw, tuple(known.values()))
    for enum in schema.enums:
        values = [number for _, number, *_ in enum["values"]]
        if len(set(values)) != len(values):
            raise SchemaError(f"{stem}: two values of {enum['name']} are the same")
    for name, _, body, *_ in raw.get("messages", []):
        if body != "-" and (body not in known or known[body].kind != "message"):
            raise SchemaError(f"{stem}: {name} has the body {body}, which is not a message")
    return schema


def _struct(entry: dict[str, Any], numbers: dict[str, int], known: dict[str, Struct]) -> Struct:
    fields: list[Field] = []
    offset, heading, widest = 0, "", 1
    for row in entry["fields"]:
        if isinstance(row, str):
            heading = row
            continue
        name, kind, meaning = row
        field, align = _field(name, kind, meaning, offset, heading, numbers, known)
        if offset % align:
            raise SchemaError(f"{entry['name']}.{name} would lie at {offset}, which is not a multiple of {align}")
        fields.append(field)
        offset, heading, widest = offset + field.bytes, "", max(widest, align)
    if offset < entry["bytes"]:
        fields.append(Field("reserved", "u8", entry["bytes"] - offset, str(entry["bytes"] - offset), offset,
                            entry["bytes"] - offset, ""))  # fmt: skip
    elif offset > entry["bytes"]:
        raise SchemaError(f"{entry['name']}: its fields take {offset} bytes, but its size is {entry['bytes']}")
    if entry["bytes"] % widest:
        raise SchemaError(f"{entry['name']}: {entry['bytes']} bytes are not a multiple of {widest}")
    if len({field.name for field in fields}) != len(fields):
        raise SchemaError(f"{entry['name']}: two fields have the same name")
    return Struct(entry["name"], entry["kind"], entry["bytes"], widest, entry["meaning"], tuple(fields))


def _field(name: str, kind: str, meaning: str, offset: int, heading: str, numbers: dict[str, int],
           known: dict[str, Struct]) -> tuple[Field, int]:  # fmt: skip
    """Return a field and its alignment."""
    if kind.startswith("to "):
        count = int(kind[3:]) - offset
        if count <= 0:
            raise SchemaError(f"{name}: offset {kind[3:]} lies before the field")
        return Field(name, "u8", count, str(count), offset, count, meaning, heading), 1
    match = re.fullmatch(r"(\w+)(?:\[(\w+)\])?", kind)
    if match is None:
        raise SchemaError(f"{name}: {kind!r} is not a type")
    base, text = match[1], match[2] or ""
    count = None if not text else int(text) if text.isdigit() else numbers[text]
    one, align = (known[base].bytes, known[base].align) if base in known else (SCALARS[base][0],) * 2
    return Field(name, base, count, text, offset, one * (1 if count is None else count), meaning, heading), align
