"""As much of a data set stays in the page cache as the job's memory allows."""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

import cotenant
from cotenant.training.contract import Lease, write_lease
from cotenant.training.files import CachedFiles, _resident_bytes

MIB = 1 << 20


@pytest.fixture
def files(tmp_path: Path) -> CachedFiles:
    paths = [tmp_path / f"{i}.bin" for i in range(24)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]) * MIB)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return CachedFiles(paths)


def own_bytes() -> int:
    return _resident_bytes(0)


def cached(path: str) -> float:
    """Part of a file's pages that are in the page cache."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        pages = (len(view) + mmap.PAGESIZE - 1) // mmap.PAGESIZE
        vector = (ctypes.c_ubyte * pages)()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        address = libc.mmap
        address.restype, address.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3,
                                                              ctypes.c_long]  # fmt: skip
        start = address(None, len(view), mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        assert libc.mincore(start, len(view), vector) == 0
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        libc.munmap(start, len(view))
        return sum(page & 1 for page in vector) / pages


def test_what_is_kept_fits_the_memory_beside_the_process(files: CachedFiles) -> None:
    assert files.total_bytes == 24 * MIB
    assert files.kept_bytes() == 24 * MIB  # until somebody says how much there is
    for wanted in (0, 5, 17, 24, 100):
        files.set_memory_budget(own_bytes() + wanted * MIB + MIB // 2)
        assert abs(files.kept_bytes() // MIB - min(wanted, 24)) <= 1  # the process itself grows and shrinks a little
    files.set_memory_budget(1)
    assert files.kept_bytes() == 0


def test_less_memory_keeps_a_part_of_what_was_kept(files: CachedFiles) -> None:
    files.set_memory_budget(own_bytes() + 16 * MIB)
    more = {i for i in range(24) if files.stays(i)}
    files.set_memory_budget(own_bytes() + 8 * MIB)
    fewer = {i for i in range(24) if files.stays(i)}
    assert fewer < more
    again = pickle.loads(pickle.dumps(files))  # as worker processes get it
    assert {i for i in range(24) if again.stays(i)} == fewer


def test_only_the_part_that_is_kept_is_in_the_page_cache_after_an_epoch(files: CachedFiles) -> None:
    if _keeps_everything(files):
        pytest.skip("this file system has no page cache that can be told to drop pages")
    files.set_memory_budget(own_bytes() + 12 * MIB)
    for i in range(24):
        assert files[i] == bytes([i]) * MIB
    held = [cached(path) for path in files.paths]
    for i, part in enumerate(held):
        assert part > 0.9 if files.stays(i) else part < 0.1
    files.set_memory_budget(own_bytes() + 3 * MIB)  # less now: what no longer fits goes at once
    for i in range(24):
        assert cached(files.paths[i]) > 0.9 if files.stays(i) else cached(files.paths[i]) < 0.1


def _keeps_everything(files: CachedFiles) -> bool:
    descriptor = os.open(files.paths[0], os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    return cached(files.paths[0]) > 0.5


def test_the_loop_tells_the_data_set_what_the_lease_gives(tmp_path: Path) -> None:
    told: list[int] = []

    class Data:
        def set_memory_budget(self, memory_bytes: int) -> None:
            told.append(memory_bytes)

    class Loader:
        dataset: Any = Data()

        def __iter__(self) -> Any:
            return iter(range(300))

    write_lease(tmp_path, 0, Lease(memory_bytes=1000))
    import time

    for step in cotenant.loop(Loader(), folder=tmp_path):
        if step == 20:
            write_lease(tmp_path, 0, Lease(memory_bytes=3000))
        time.sleep(0.002)
    assert told == [1000, 3000]
