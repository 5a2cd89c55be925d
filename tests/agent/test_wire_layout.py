"""The Python side of the protocol against the C header: a small program prints every size, offset and constant."""

from __future__ import annotations

import ctypes
import enum
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from native_sources import SHIM

from cotenant.agent.ipc import wire
from cotenant.agent.ipc.page import PageLayout, Slot

HEADER = SHIM / "protocol.h"

ENUMS: dict[str, type[enum.IntEnum] | type[enum.IntFlag]] = {
    "": wire.Type,
    "FAIL_": wire.FailMode,
    "MEMORY_": wire.Family,
    "RELEASE_": wire.Reason,
    "SLOT_": wire.SlotFlag,
    "WARN_": wire.Warn,
    "OVERSUBSCRIBE_": wire.Oversubscribe,
    "MOVE_": wire.MoveFlag,
}
STATUS = {status: f"COTENANT_{status.name}" for status in wire.Status}


def expected() -> dict[str, int]:
    """What Python believes: `struct`, `struct.field` and constants, by C name."""
    facts: dict[str, int] = {
        "COTENANT_PROTOCOL_MAGIC": wire.MAGIC,
        "COTENANT_PROTOCOL_VERSION": wire.VERSION,
        "COTENANT_MESSAGE_BYTES": wire.MESSAGE_BYTES,
        "COTENANT_PAGE_BYTES": wire.PAGE_BYTES,
        "COTENANT_MAX_GPUS": wire.MAX_GPUS,
        "COTENANT_NO_SLOT": wire.NO_SLOT,
    }
    for prefix, names in ENUMS.items():
        facts |= {f"COTENANT_{prefix}{entry.name}": int(entry) for entry in names}
    facts |= {name: int(status) for status, name in STATUS.items()}
    for name, fields in wire.LAYOUTS.items():
        offset = 0
        for field, fmt in fields:
            facts[f"cotenant_{name}.{field}"] = offset
            offset += struct.calcsize("=" + fmt)
        facts[f"cotenant_{name}"] = offset
    for name, layout in (("slot", Slot), ("page", PageLayout)):
        for field in layout._fields_:
            facts[f"cotenant_{name}.{field[0]}"] = getattr(layout, field[0]).offset
        facts[f"cotenant_{name}"] = ctypes.sizeof(layout)
    return facts


def measured(folder: Path, names: list[str]) -> dict[str, int]:
    """The same facts, printed by a program that includes the header."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    lines = []
    for name in names:
        if name.startswith("COTENANT_"):
            value = name
        elif "." in name:
            value = f"offsetof(struct {name.replace('.', ', ')})"
        else:
            value = f"sizeof(struct {name})"
        lines.append(f'printf("{name} %llu\\n", (unsigned long long)({value}));')
    source = folder / "facts.c"
    source.write_text(
        f'#include <stdio.h>\n#include <stddef.h>\n#include "{HEADER}"\nint main(void) {{\n'
        + "\n".join(lines)
        + "\n}\n"
    )
    subprocess.run([compiler, str(source), "-o", str(folder / "facts")], check=True)
    out = subprocess.run([str(folder / "facts")], check=True, capture_output=True, text=True).stdout
    return {line.split()[0]: int(line.split()[1]) for line in out.splitlines()}


def test_python_and_c_agree_on_every_byte(tmp_path: Path) -> None:
    facts = expected()
    assert len(facts) > 150
    assert measured(tmp_path, list(facts)) == facts


def test_no_enumerator_of_the_header_is_missing_here() -> None:
    """A constant that C gains must be known to Python too."""
    import re

    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)
    in_c = set()
    for block in re.findall(r"enum \w+ \{(.*?)\}", text, flags=re.S):
        in_c |= set(re.findall(r"(COTENANT_\w+)\s*=", block))
    assert in_c - set(expected()) == set()


def test_packing_round_trips() -> None:
    data = wire.pack(wire.Type.HELLO, {"pid": 7, "token": b"t", "program": b"p" * 63}, sequence=3, slot=2)
    assert len(data) == wire.MESSAGE_BYTES
    head = wire.parse_head(data)
    assert (head.type, head.sequence, head.slot) == (wire.Type.HELLO, 3, 2)
    assert wire.fields("hello", data)["pid"] == 7
    grant = wire.fields("token_grant", wire.pack_grant(1, 0, 5, 9, 100, 2))
    assert grant == {"epoch": 9, "deadline_ns": 100, "inflight_allowed_ns": 2}
    reply = wire.pack_memory_reply(1, 0, 5, 1, 2, 3, 4, 6)
    assert wire.fields("memory", reply) == {
        "family": 1, "reservation": 2, "bytes": 3, "used_bytes": 4, "limit_bytes": 6,
    }  # fmt: skip
    assert wire.parse_head(reply).status == 5


def test_a_long_sentence_is_cut_to_fit() -> None:
    data = wire.pack_text(wire.Type.ERROR, 1, "ä" * 400)
    text = wire.text_of(wire.fields("text", data)["text"])
    assert text == "ä" * 107
