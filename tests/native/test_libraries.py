"""The compiled libraries: found, compiled again when a source has changed, and a sentence when that cannot be done."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from native_sources import NATIVE

from cotenant.core.errors import InputError
from cotenant.native import environment, libraries
from cotenant.native.libraries import compiled, library_path

ALL = (libraries.DRIVER_SHIM, libraries.NVML_SHIM, libraries.SOFT_DRIVER, libraries.SOFT_NVML, libraries.RULES)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose one library says what is in its source."""
    folder = tmp_path / "native"
    folder.mkdir()
    (folder / "text").write_text("one")
    (folder / "Makefile").write_text("all:\n\techo made >> $(OUT)/log\n\tcp text $(OUT)/lib\n")
    return tmp_path


def log(checkout: Path) -> list[str]:
    return (checkout / "build" / "native" / "log").read_text().split()


def test_compiled_when_a_source_has_changed_and_only_then(checkout: Path) -> None:
    library = compiled(checkout) / "lib"
    assert compiled(checkout) / "lib" == library == checkout / "build" / "native" / "lib"
    assert (library.read_text(), log(checkout)) == ("one", ["made"])
    (checkout / "native" / "text").write_text("two")
    # far in the future, so that the file is newer whatever resolution the file system's clock has
    os.utime(checkout / "native" / "text", ns=(2**62, 2**62))
    compiled(checkout)
    assert (library.read_text(), log(checkout)) == ("two", ["made", "made"])


def test_of_several_who_want_it_at_once_one_compiles(checkout: Path) -> None:
    makefile = checkout / "native" / "Makefile"
    makefile.write_text(makefile.read_text().replace("\tcp", "\tsleep 0.1\n\tcp"))
    with ThreadPoolExecutor(8) as pool:
        found = {(folder / "lib").read_text() for folder in pool.map(compiled, [checkout] * 8)}
    assert (found, log(checkout)) == ({"one"}, ["made"])


def test_what_cannot_be_compiled_is_one_sentence(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout / "native" / "Makefile").write_text("all:\n\techo no such thing >&2; false\n")
    for _ in range(2):  # the second attempt must fail in the same way
        with pytest.raises(InputError, match="needs make and a C compiler: no such thing"):
            compiled(checkout)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InputError, match="needs make and a C compiler, and there is no make"):
        compiled(checkout)
    shutil.rmtree(checkout / "build")
    (checkout / "build").write_text("")
    with pytest.raises(InputError, match="cannot be compiled: Not a directory"):
        compiled(checkout)


def test_an_installation_has_them_beside_the_module_and_compiles_nothing(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = checkout / "site" / "cotenant" / "native" / "libraries.py"
    installed.parent.mkdir(parents=True)
    monkeypatch.setattr(libraries, "__file__", str(installed))
    monkeypatch.setattr(libraries, "CHECKOUT", checkout / "site")
    with pytest.raises(InputError, match=r"other\.so is not part of this installation"):
        library_path.__wrapped__("other.so")
    (installed.parent / "lib.so").write_text("")
    assert library_path.__wrapped__("lib.so") == installed.parent / "lib.so"


def test_no_library_asks_for_a_newer_c_library_than_2_17() -> None:
    """They are loaded into containers of any image."""
    for name in ALL:
        listed = ["nm", "-D", "--undefined-only", str(library_path(name))]
        text = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
        newer = {
            line for line in text.splitlines() for version in re.findall(r"@GLIBC_([\d.]+)", line)
            if tuple(map(int, version.split("."))) > (2, 17)
        }  # fmt: skip
        assert newer == set(), name


def test_the_compiler_has_nothing_to_warn_of() -> None:
    """One name inside another is how a macro came to charge a number that was never set."""
    tests = Path(__file__).resolve().parents[1] / "shim"
    sources = [*NATIVE.rglob("*.c"), *tests.glob("*.c")]
    strict = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-fsyntax-only", "-Wshadow", "-Werror"]
    places = ["-Wno-missing-field-initializers", f"-I{NATIVE}", f"-I{NATIVE / 'shim'}"]

    def check(source: Path) -> str:
        command = ["cc", *strict, *places, str(source)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    with ThreadPoolExecutor() as pool:
        assert "".join(pool.map(check, sources)) == ""
    assert len(sources) > 50


def test_environment_says_where_things_are_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/other.so")
    monkeypatch.delenv("COTENANT_SOFTGPU_STATE", raising=False)
    added = environment.tenant_environment("/run/a.sock", "secret", library_path(libraries.SOFT_DRIVER))
    assert set(added) == {"LD_PRELOAD", "COTENANT_SOCKET", "COTENANT_TOKEN", "COTENANT_DRIVER"}
    assert added["LD_PRELOAD"].split(":") == [str(library_path(libraries.DRIVER_SHIM)), "/usr/lib/other.so"]


def test_a_folder_that_the_loader_cannot_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "library_path", lambda name: Path("/opt/a b") / name)
    with pytest.raises(InputError, match=r"cannot preload from '/opt/a b/libcotenant-shim\.so'"):
        environment.tenant_environment("/run/a.sock", "t", "/usr/lib/libcotenant-softgpu.so")


def test_a_worktree_s_own_libraries_win_over_an_installation() -> None:
    """PYTHONPATH=CHECKOUT/src is enough."""
    root = NATIVE.parent
    code = "from cotenant.native.libraries import *; print(library_path(DRIVER_SHIM))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(root / "src")}, capture_output=True, text=True
    )  # fmt: skip
    assert Path(done.stdout.strip()) == root / "build" / "native" / libraries.DRIVER_SHIM, done.stderr
