"""Files and folders that are written completely or not at all."""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from cotenant.core.errors import InputError

_PART = re.compile(r"\.part-(\d+)$")


def cannot_write(path: str | Path, error: OSError) -> InputError:
    """Return the InputError for an output that cannot be written, with the path and the system's error."""
    return InputError(f"cannot write here: {(error.strerror or str(error)).lower()}", file=path)


def _is_stream(path: str | Path) -> bool:
    """Whether `path` is a pipe or device. It must be written directly: a temporary file that is renamed to `path` would
    replace the pipe or device.
    """
    found = Path(path)
    return found.exists() and not found.is_file()


@contextmanager
def atomic_file(path: str | Path) -> Iterator[TextIO]:
    """Open a text file (UTF-8) that replaces `path` when the block ends without an error. Symbolic links are kept: the
    file that they point to is replaced. Pipes and devices (/dev/stdout) are written directly. To write bytes, use the
    file's `buffer`. Raises InputError if the file cannot be created.
    """
    if Path(path).is_dir():
        raise InputError("is a folder; name a file", file=path)
    if _is_stream(path):
        try:
            with Path(path).open("w", encoding="utf-8", newline="\n") as handle:
                yield handle
        except OSError as error:
            raise cannot_write(path, error) from error
        return
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{target.name}.part-{os.getpid()}")
    _remove_leftovers(target)
    try:
        handle = part.open("w", encoding="utf-8", newline="\n")
    except OSError as error:
        raise cannot_write(path, error) from error
    try:
        with handle:
            yield handle
        os.replace(part, target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise cannot_write(path, error) from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write a text file as `atomic_file` does: completely or not at all."""
    with atomic_file(path) as file:
        file.write(text)


def check_writable(*paths: str | Path | None) -> None:
    """Raise InputError if a file cannot be written at one of the paths; called before long work. Leaves nothing behind.
    """
    for path in paths:
        if path is None:
            continue
        if Path(path).is_dir():
            raise InputError("is a folder; name a file", file=path)
        if not _is_stream(path):
            target = Path(os.path.realpath(path))
            _probe(target.parent, target.name, path)


def _probe(folder: Path, name: str, path: str | Path) -> None:
    """Raise InputError about `path` if no file can be created in the folder."""
    probe = folder / f".{name}.part-{os.getpid()}"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise cannot_write(path, error) from error


def _check_destination(target: Path, holds: str, named: str | Path) -> None:
    if target.exists() and not target.is_dir():
        raise InputError("exists and is not a folder; choose another name", file=named)
    if target.is_dir() and any(target.iterdir()) and not (target / holds).exists():
        raise InputError("exists and contains something other than a run; choose another folder", file=named)


def check_folder(path: str | Path, holds: str) -> None:
    """Raise InputError if no folder can be created at `path`, or if one exists that is neither empty nor contains the
    file `holds`.
    """
    target = Path(os.path.abspath(path))
    _check_destination(target, holds, path)
    # the folders below this parent are created later
    _probe(next(folder for folder in target.parents if folder.exists()), target.name, path)


class AtomicFolder:
    """A folder that is filled beside its destination and then moved there by one rename.

    `replaceable` is the name of a file that marks an earlier folder of the same kind, which may be replaced; any other
    non-empty folder is an InputError, raised before any work is done.
    """

    def __init__(self, path: str | Path, replaceable: str) -> None:
        self.path = Path(os.path.abspath(path))
        _check_destination(self.path, replaceable, path)
        self.part = self.path.with_name(f".{self.path.name}.part-{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(self.path)
            self.part.mkdir()
        except OSError as error:
            raise cannot_write(path, error) from error

    def commit(self) -> None:
        """Move the filled folder to its destination."""
        old = self.part.with_name(self.part.name + ".old")
        try:
            if self.path.exists():
                os.rename(self.path, old)
            os.rename(self.part, self.path)
        except OSError as error:
            self.discard()
            raise cannot_write(self.path, error) from error
        shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Remove what was written so far. The folder's destination is not changed."""
        shutil.rmtree(self.part, ignore_errors=True)


def _remove_leftovers(target: Path) -> None:
    """Remove temporary folders of `target` whose writers were killed, and those of an earlier writer in this
    process.
    """
    for other in target.parent.glob(f".{glob.escape(target.name)}.part-*"):
        match = _PART.search(other.name)
        if match and (int(match.group(1)) == os.getpid() or not _alive(int(match.group(1)))):
            if other.is_dir():
                shutil.rmtree(other, ignore_errors=True)
            else:
                other.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
