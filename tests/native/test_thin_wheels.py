"""bench/gpu/thin_wheels.py: what stays of a library's machine code, and that the parts contain all files."""

from __future__ import annotations

import importlib
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

PTX, SASS = 1, 2
Entry = tuple[int, int, bytes]  # kind, architecture, payload
BOXES: list[list[Entry]] = [
    [(PTX, 80, b"p" * 64), (SASS, 80, b"8" * 64), (SASS, 90, b"9" * 48), (SASS, 90, b"a" * 16), (SASS, 100, b"b" * 72)],
    [(PTX, 80, b"p" * 16), (SASS, 80, b"8" * 64), (SASS, 75, b"7" * 32)],
    [(SASS, 90, b"c" * 24)],
    [(PTX, 80, b"p" * 40)],
]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench" / "gpu"))
    return importlib.import_module("thin_wheels")


def box(entries: Sequence[Entry]) -> bytes:
    """A fat binary, whose entries have headers of 64 bytes, and padding after it."""
    content = b""
    for kind, architecture, payload in entries:
        header = struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(payload), 0, 0, 1, 8, architecture)
        content += header.ljust(64, b"h") + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content + bytes(24)


def library(path: Path, boxes: Sequence[Sequence[Entry]]) -> Path:
    """A 64-bit ELF file with the sections .text and .nv_fatbin."""
    names, text, code = b"\0.text\0.nv_fatbin\0.shstrtab\0", b"t" * 40, b"".join(box(each) for each in boxes)
    rows, at = [(0, 0, 0)], 64
    for name, content in ((1, text), (7, code), (18, names)):
        rows.append((name, at, len(content)))
        at += len(content)
    head = b"\x7fELF".ljust(40, b"\0") + struct.pack("<QIHHHHHH", at, 0, 64, 0, 0, 64, len(rows), 3)
    table = b"".join(struct.pack("<IIQQQQ", name, 1, 0, 0, begin, size).ljust(64, b"\0") for name, begin, size in rows)
    path.write_bytes(head + text + code + names + table)
    return path


def entries(tool: Any, path: Path) -> list[list[Entry]]:
    data = path.read_bytes()
    found = []
    for _, _, inside in tool.boxes(data, *tool.section(data, b".nv_fatbin")):
        found.append([(SASS if sass else PTX, has, data[at + 64 : at + size]) for sass, has, at, size in inside])
    return found


def test_only_the_code_for_one_architecture_stays(tool: Any, tmp_path: Path) -> None:
    path = library(tmp_path / "a.so", BOXES)
    before = path.read_bytes()
    tool.thin(path, 90)
    after = path.read_bytes()
    # a fat binary without code for it has a header of another architecture, which the driver does not select
    assert entries(tool, path) == [
        [(SASS, 90, b"9" * 48), (SASS, 90, b"a" * 16)], [(SASS, 75, bytes(32))], [(SASS, 90, b"c" * 24)],
        [(PTX, 80, bytes(40))],
    ]  # fmt: skip
    assert len(after) == len(before)
    magic = struct.pack("<I", 0xBA55ED50)
    assert [i for i in range(len(after)) if after.startswith(magic, i)] == [
        i for i in range(len(before)) if before.startswith(magic, i)
    ]
    (begin, size) = tool.section(before, b".nv_fatbin")
    assert (before[:begin], before[begin + size :]) == (after[:begin], after[begin + size :])


def test_files_without_machine_code_stay_as_they_are(tool: Any, tmp_path: Path) -> None:
    for path in (library(tmp_path / "none.so", []), tmp_path / "script.so"):
        if not path.exists():
            path.write_text("INPUT(libother.so)")
        before = path.read_bytes()
        assert tool.thin(path, 90) == 0
        assert path.read_bytes() == before


def test_parts_unpack_to_the_same_files(tool: Any, tmp_path: Path) -> None:
    site, out = tmp_path / "site", tmp_path / "out"
    (site / "package").mkdir(parents=True)
    library(site / "package" / "a.so", BOXES)
    (site / "one.py").write_text("".join(f"x{i} = {i * 7919 % 1013}\n" for i in range(2000)))
    out.mkdir()
    parts = tool.pack(site, out, 500)
    assert len(parts) > 10
    assert all(part.stat().st_size <= 500 for part in parts)
    command = [sys.executable, str(out / "part-0" / "unpack.py"), str(tmp_path / "again")]
    folders = [str(part.parent) for part in reversed(parts)]
    subprocess.run([*command, *folders], check=True)
    for path in site.rglob("*"):
        if path.is_file():
            assert (tmp_path / "again" / path.relative_to(site)).read_bytes() == path.read_bytes()
    parts[3].unlink()
    lacking = subprocess.run([*command, *folders], capture_output=True, text=True, check=False)
    assert f"{len(parts) - 1} of {len(parts)} parts" in lacking.stderr
