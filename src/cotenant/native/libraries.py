"""Finds the compiled libraries: the shim, the software GPU, and the rules that C and Python share.

In an installation they are in the folder of this file, and no compiler is needed. In a source checkout they are in
build/native, and `make` compiles them if a source has changed.
"""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
import sys
from pathlib import Path

from cotenant.core.errors import InputError

DRIVER_SHIM = "libcotenant-shim.so"  # the shim library, which stands in for libcuda.so.1 in a tenant's program
NVML_SHIM = "libcotenant-nvml.so"  # the shim library that stands in for libnvidia-ml.so.1 in a tenant's program
# the software GPU's driver; it is not named libcuda.so.1, so that no program can load it by accident
SOFT_DRIVER = "libcotenant-softgpu.so"
SOFT_NVML = "libcotenant-softnvml.so"
# the rules for launches and copies, for the simulator and for programs that run without the shim
RULES = "libcotenant-rules.so"

CHECKOUT = Path(__file__).resolve().parents[3]


@functools.cache
def library_path(name: str) -> Path:
    """Return the path of a compiled library. Raises InputError if the installation lacks it, or if it cannot be
    compiled.
    """
    if (CHECKOUT / "native" / "Makefile").is_file():
        return compiled(CHECKOUT) / name
    found = Path(__file__).with_name(name)
    if not found.exists():
        raise InputError(f"{name} is not part of this installation: wheels for Linux on x86-64 have it", file=found)
    return found


def compiled(checkout: Path) -> Path:
    """Return the folder with a checkout's libraries. They are compiled first if a source has changed; a lock ensures
    that only one process does so at a time. Raises InputError if they cannot be compiled."""
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
    """Whether a file in native/ is newer than the beginning of the last successful compilation."""
    try:
        since = (out / "compiled").stat().st_mtime_ns
        return any(path.stat().st_mtime_ns > since for path in (checkout / "native").rglob("*"))
    except OSError:  # no library was compiled yet, or a source file was just deleted
        return True


def _make(sources: Path, out: Path) -> None:
    # the line is printed only for a person who waits, since a program may parse this process's standard error
    if sys.stderr.isatty():
        print("compiling the driver shim (some seconds)", file=sys.stderr)
    environment = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    command = ["make", "-s", "-C", str(sources), f"-j{os.cpu_count()}", f"OUT={out}"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise InputError("a source checkout needs make and a C compiler, and there is no make") from None
    if done.returncode != 0:
        raise InputError(f"a source checkout needs make and a C compiler: {' '.join(done.stderr.split()[:60])}")
