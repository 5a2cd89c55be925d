"""Building the libraries: once per content, in place by rename, and a sentence when it cannot be done."""

from __future__ import annotations

import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from native_sources import SHIM, SOFTGPU

from cotenant.core.errors import InputError
from cotenant.shim import build as shim_build
from cotenant.shim.elf import defined_symbols
from cotenant.shim.stubs import stub_assembly


def test_built_once_per_content(tmp_path: Path) -> None:
    made = []

    def make(scratch: Path, target: Path) -> None:
        made.append(scratch)
        target.write_text("library")

    first = shim_build.cached("l.so", [b"a"], make, tmp_path)
    again = shim_build.cached("l.so", [b"a"], make, tmp_path)
    other = shim_build.cached("l.so", [b"ab"], make, tmp_path)
    apart = shim_build.cached("l.so", [b"a", b"b"], make, tmp_path)
    assert first == again
    assert len({first, other, apart}) == 3
    assert len(made) == 3
    assert not any(folder.exists() for folder in made)


def test_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    def make(scratch: Path, target: Path) -> None:
        target.write_text("half")
        raise InputError("no")

    with pytest.raises(InputError):
        shim_build.cached("l.so", [b"a"], make, tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_compiler_has_nothing_to_warn_of() -> None:
    """One name inside another is how a macro came to charge a number that was never set."""
    folders = [SHIM, SOFTGPU, Path(__file__).parent]
    strict = ["-fsyntax-only", "-Wshadow", "-Werror", "-Wno-missing-field-initializers", f"-I{SHIM}"]
    sources = [source for folder in folders for source in sorted(folder.rglob("*.c"))]

    def check(source: Path) -> str:
        command = [os.environ.get("CC", "cc"), *shim_build.C_FLAGS, *strict, str(source)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    with ThreadPoolExecutor() as pool:
        assert "".join(pool.map(check, sources)) == ""
    assert len(sources) > 20


def test_missing_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(InputError, match="a C compiler is needed to build the driver shim"):
        shim_build.build(cache=tmp_path)


def test_cache_that_cannot_be_used_is_one_sentence(soft_library: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(InputError, match="COTENANT_CACHE names another folder"):
        shim_build.build(cache=blocked)
    with pytest.raises(InputError, match="must have no blank or colon"):
        shim_build.tenant_environment("/run/a.sock", "t", soft_library, cache=tmp_path / "a b")


def test_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(b"not ELF at all")
    with pytest.raises(ValueError, match="not a 64-bit little-endian ELF file"):
        defined_symbols(path, dynamic=True)


def test_every_export_has_a_slot_and_wrapped_ones_no_jump() -> None:
    text = stub_assembly(["cuA", "cuB"], {"cuB", "cuC"}, "opener")
    assert text.count("    .quad cot_lazy_") + text.count(": .quad cot_lazy_") == 3
    assert "jmp *cot_real_cuA(%rip)" in text
    assert "jmp *cot_real_cuB(%rip)" not in text
    assert "cot_export_count: .long 3" in text


def test_environment_says_where_things_are_and_nothing_else(
    soft_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/other.so")
    monkeypatch.delenv("COTENANT_SOFTGPU_STATE", raising=False)
    environment = shim_build.tenant_environment("/run/a.sock", "secret", soft_library)
    assert set(environment) == {"LD_PRELOAD", "COTENANT_SOCKET", "COTENANT_TOKEN", "COTENANT_DRIVER"}
    first, last = environment["LD_PRELOAD"].split(":")
    assert os.path.basename(first) == "libcotenant-shim.so"
    assert last == "/usr/lib/other.so"


def test_of_several_who_want_it_at_once_one_builds(tmp_path: Path) -> None:
    made: list[int] = []

    def make(scratch: Path, target: Path) -> None:
        made.append(1)
        time.sleep(0.1)
        target.write_text("built")

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: shim_build.cached("lib.so", [b"x"], make, tmp_path), range(8)))
    assert len(made) == 1
    assert {path.read_text() for path in found} == {"built"}
