"""Files and folders that appear whole or not at all."""

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
    """InputError for an output that cannot be written, with path and system error."""
    return InputError(f"cannot write here: {(error.strerror or str(error)).lower()}", file=path)


def _is_stream(path: str | Path) -> bool:
    """Whether something other than a file is at `path`, such as a pipe or a device: renaming would replace it."""
    found = Path(path)
    return found.exists() and not found.is_file()


@contextmanager
def atomic_file(path: str | Path) -> Iterator[TextIO]:
    """A text file (UTF-8) that appears at `path` when the block ends without an error; until then the old one stays.

    A link stays one: the file behind it is replaced. What is no file (a pipe, /dev/stdout) is written as it goes. Bytes
    go to its `buffer`. Raises InputError where the file cannot be made.
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


def check_writable(path: str | Path) -> None:
    """InputError where a file cannot be written at `path`; to be asked before long work. Leaves nothing behind."""
    if Path(path).is_dir():
        raise InputError("is a folder; name a file", file=path)
    if _is_stream(path):
        return
    target = Path(os.path.realpath(path))
    probe = target.with_name(f".{target.name}.part-{os.getpid()}")
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise cannot_write(path, error) from error


def _check_destination(target: Path, holds: str, named: str | Path) -> None:
    if target.exists() and not target.is_dir():
        raise InputError("exists and is not a folder; choose another name", file=named)
    if target.is_dir() and any(target.iterdir()) and not (target / holds).exists():
        raise InputError("exists and holds something else than a run; choose another folder", file=named)


def check_folder(path: str | Path, holds: str) -> None:
    """InputError where a folder cannot be made at `path`, or where one is that has other things than `holds` in it."""
    target = Path(os.path.abspath(path))
    _check_destination(target, holds, path)
    parent = next(folder for folder in target.parents if folder.exists())  # the ones below it will be made
    probe = parent / f".{target.name}.part-{os.getpid()}"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise cannot_write(path, error) from error


class AtomicFolder:
    """A folder that is filled beside its destination and takes its place in one rename.

    `replaceable` is a file name that marks an earlier folder of the same kind: such a folder is replaced, any other
    folder that is not empty is an InputError, raised before any work is done.
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
        """Put the folder in its place."""
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
        """Remove what was written so far; the destination stays as it was."""
        shutil.rmtree(self.part, ignore_errors=True)


def _remove_leftovers(target: Path) -> None:
    """Parts of `target` left by processes that were killed, and our own of an earlier writer."""
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
