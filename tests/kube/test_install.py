"""The shim's files on a node: whole, never written twice, and found in a container."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from native_sources import SHIM

from cotenant.core.errors import InputError
from cotenant.kube.install import put
from cotenant.native.libraries import DRIVER_SHIM, NVML_SHIM


def libraries(folder: Path, text: str) -> dict[str, Path]:
    found = {}
    for name in (DRIVER_SHIM, NVML_SHIM):
        (folder / name).write_text(f"{name} {text}")
        found[name] = folder / name
    return found


def test_a_new_build_leaves_the_old_one_to_those_who_have_it(tmp_path: Path) -> None:
    target = tmp_path / "lib"
    first = put(libraries(tmp_path, "one"), target)
    held = open(target / "current" / DRIVER_SHIM)  # noqa: SIM115 as a running pod has it mapped
    inode = os.stat(first / DRIVER_SHIM).st_ino
    assert put(libraries(tmp_path, "one"), target) == first
    assert os.stat(first / DRIVER_SHIM).st_ino == inode, "the same build is not written again"
    second = put(libraries(tmp_path, "two"), target)
    assert second != first
    assert os.readlink(target / "current") == second.name, "relative, so it holds wherever the folder is mounted"
    assert (target / "current" / DRIVER_SHIM).read_text() == "libcotenant-shim.so two"
    assert (first / DRIVER_SHIM).read_text() == held.read() == "libcotenant-shim.so one"
    assert sorted(path.name for path in target.iterdir()) == sorted([first.name, second.name, "current"])
    held.close()


def test_a_shim_that_lost_its_contents_with_the_power_is_written_again(tmp_path: Path) -> None:
    target = tmp_path / "lib"
    folder = put(libraries(tmp_path, "one"), target)
    (folder / DRIVER_SHIM).write_bytes(b"")
    (folder / NVML_SHIM).unlink()
    assert put(libraries(tmp_path, "one"), target) == folder
    assert (folder / DRIVER_SHIM).read_text() == "libcotenant-shim.so one"
    assert sorted(path.name for path in folder.iterdir()) == sorted([DRIVER_SHIM, NVML_SHIM])
    assert os.access(folder / NVML_SHIM, os.X_OK)


def test_a_full_disk_leaves_no_half_of_a_shim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    made = libraries(tmp_path, "one")
    folder = put(made, tmp_path / "lib")
    (folder / DRIVER_SHIM).write_bytes(b"")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left"):
        put(made, tmp_path / "lib")
    assert sorted(path.name for path in folder.iterdir()) == sorted([DRIVER_SHIM, NVML_SHIM])


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="cannot be written: Not a directory"):
        put(libraries(tmp_path, "one"), tmp_path / "file" / "lib")


def test_the_first_driver_of_a_list_is_found(tmp_path: Path) -> None:
    """The C side of COTENANT_DRIVER: places that are not there, relative ones and empty ones are passed over."""
    source = tmp_path / "t.c"
    source.write_text(
        '#include <stdio.h>\n#include "paths.h"\n'
        "int main(int n, char **v) { char f[COTENANT_PATH_BYTES];"
        ' const char *p = cot_first_file(n > 1 ? v[1] : NULL, f); puts(p ? p : "none"); return 0; }\n'
    )
    try:
        subprocess.run(["cc", f"-I{SHIM}", str(source), "-o", str(tmp_path / "t")], check=True)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    there = tmp_path / "libcuda.so.1"
    there.write_text("")

    def first(text: str) -> str:
        return subprocess.run([tmp_path / "t", text], capture_output=True, text=True, check=True).stdout.strip()

    assert first(f"/no/libcuda.so.1:{there}") == str(there)
    assert first(f":relative:{there}:/etc/passwd") == str(there)
    assert first(str(there)) == str(there)
    assert first("/no/a:/no/b") == first("") == first("libcuda.so.1") == "none"
    assert first("/" + "x" * 5000 + f":{there}") == str(there)
