"""The source distribution has all that the wheel is built from, and the wheel runs where there is no compiler."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from native_sources import NATIVE

import cotenant
from cotenant.native import libraries

pytest.importorskip("hatchling")


@pytest.mark.slow
def test_from_the_sources_to_an_installation(tmp_path: Path) -> None:
    sdist = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(sdist, cwd=NATIVE.parent, check=True, capture_output=True, timeout=120)
    source = tmp_path / f"cotenant-{cotenant.__version__}.tar.gz"
    packing = ["pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run([sys.executable, "-m", *packing], check=True, capture_output=True, timeout=240)
    wheel = tmp_path / f"cotenant-{cotenant.__version__}-py3-none-manylinux_2_17_x86_64.whl"
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "site")
    code = (
        "from cotenant.native import libraries as l; import ctypes\n"
        "for name in [n for n in vars(l).values() if isinstance(n, str) and n.startswith('libcotenant-')]:\n"
        "    print(ctypes.CDLL(str(l.library_path(name)))._name)\n"
    )
    bare = {"PATH": "/nowhere", "PYTHONPATH": str(tmp_path / "site"), "HOME": "/nowhere"}
    done = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "site" / "cotenant" / "native"
    assert {Path(line) for line in done.stdout.splitlines()} == set(folder.glob("*.so"))
    assert (folder / libraries.DRIVER_SHIM).exists()
