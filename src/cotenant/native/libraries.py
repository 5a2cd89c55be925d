"""Where the compiled libraries are.

In an installation they lie beside this file, and no compiler is ever called. In a source checkout they are in
build/native, and `make` compiles them when a source has changed.
"""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
import sys
from pathlib import Path

from cotenant.core.errors import InputError

DRIVER_SHIM = "libcotenant-shim.so"  # stands in for libcuda.so.1
NVML_SHIM = "libcotenant-nvml.so"  # stands in for libnvidia-ml.so.1
SOFT_DRIVER = "libcotenant-softgpu.so"  # never found as libcuda.so.1: a tenant gets it only when the launcher says so
SOFT_NVML = "libcotenant-softnvml.so"
RULES = "libcotenant-rules.so"  # rules of launches and copies, for the simulator and for programs without the shim

CHECKOUT = Path(__file__).resolve().parents[3]


@functools.cache
def library_path(name: str) -> Path:
    """Path of a compiled library. InputError: this installation has none, or it cannot be compiled in this checkout."""
    if (CHECKOUT / "native" / "Makefile").is_file():
        return compiled(CHECKOUT) / name
    found = Path(__file__).with_name(name)
    if not found.exists():
        raise InputError(f"{name} is not part of this installation: wheels for Linux on x86-64 have it", file=found)
    return found


def compiled(checkout: Path) -> Path:
    """The folder of a checkout's libraries, which are compiled first if a source has changed; one process at a time."""
    out = checkout / "build" / "native"
    if not _is_stale(checkout, out):
        return out
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_stale(checkout, out):
                begun = out / "begun"
                begun.touch()
                _make(checkout / "native", out)
                begun.rename(out / "compiled")
        finally:
            os.close(lock)
    except OSError as error:
        raise InputError(f"the libraries cannot be compiled: {error.strerror or error}", file=out) from None
    return out


def _is_stale(checkout: Path, out: Path) -> bool:
    """Whether something in native/ is newer than the begin of the last compilation that succeeded."""
    try:
        since = (out / "compiled").stat().st_mtime_ns
        return any(path.stat().st_mtime_ns > since for path in (checkout / "native").rglob("*"))
    except OSError:  # the library was never compiled, or a source was just deleted
        return True


def _make(sources: Path, out: Path) -> None:
    if sys.stderr.isatty():  # a person waits; what programs read from there stays theirs
        print("compiling the driver shim (some seconds)", file=sys.stderr)
    environment = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    command = ["make", "-s", "-C", str(sources), f"-j{os.cpu_count()}", f"OUT={out}"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise InputError("a source checkout needs make and a C compiler, and there is no make") from None
    if done.returncode != 0:
        raise InputError(f"a source checkout needs make and a C compiler: {' '.join(done.stderr.split()[:60])}")
