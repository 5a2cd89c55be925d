"""Temporary folders that the next start removes if their process was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def temporary_folder(kind: str, tidy: Callable[[Path], object] | None = None) -> Iterator[Path]:
    """Create a temporary folder named cotenant-KIND-..., and remove it at the end.

    First removes the folders of this kind that killed processes of this user have left. The lock on a folder tells that
    its process still runs. `tidy` is called with such a folder before it is removed, to end what still runs in it.
    """
    prefix = f"cotenant-{kind}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        if (lock := _lock(left)) is not None:
            if tidy is not None:
                tidy(left)
            _remove(left, lock)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        # None: another process has just taken the folder for one that was left
        if (lock := _lock(folder)) is not None:
            break
    try:
        yield folder
    finally:
        _remove(folder, lock)


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder of this user. Returns the descriptor that holds the lock; None if another process has the lock, or
    the folder is gone or not this user's.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # the process that held the lock before may have removed the folder
        if os.fstat(descriptor).st_uid == os.geteuid() and os.path.samestat(os.fstat(descriptor), folder.lstat()):
            return descriptor
    os.close(descriptor)
    return None
