"""Measures this machine's read speeds: from storage without the page cache, and from memory."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np

from cotenant.core.errors import InputError

MOST_BYTES = 256 << 20
CHUNK = 4 << 20


def dataset_bytes(path: Path) -> int:
    """Return the total bytes of a file, or of all files below a folder; InputError if there are none."""
    try:
        if path.is_file():
            total = path.stat().st_size
        else:
            total = sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", file=path, field="dataset") from None
    if total == 0:
        raise InputError("holds no data" if path.exists() else "does not exist", file=path, field="dataset")
    return total


def storage_mbps(path: Path | None) -> float:
    """Return the speed in 10^6 bytes per second at which the files at `path` are read from storage, not from the page
    cache. Without `path`, a temporary file in the current folder is written and read.
    """
    if path is None:
        with tempfile.NamedTemporaryFile(dir=".", prefix=".cotenant-") as file:
            block = os.urandom(CHUNK)
            for _ in range(MOST_BYTES // 4 // CHUNK):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return _read([Path(file.name)])
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    return _read(files)


def _read(files: list[Path]) -> float:
    total, taken = 0, 0.0
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            while total < MOST_BYTES and (block := os.read(descriptor, CHUNK)):
                total += len(block)
            taken += time.perf_counter() - began
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        if total >= MOST_BYTES:
            break
    return total / max(taken, 1e-9) / 1e6


def memory_mbps() -> float:
    """Return the rate in 10^6 bytes per second at which one thread reads from memory: the median of a few passes over
    256 MiB.
    """
    block = np.ones(MOST_BYTES // 8, dtype=np.int64)
    speeds = []
    for _ in range(5):
        began = time.perf_counter()
        block.sum()
        speeds.append(block.nbytes / (time.perf_counter() - began) / 1e6)
    return float(np.median(speeds))
