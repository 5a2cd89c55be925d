"""Logs of a server as CSV: one row per request of a service, and the GPUs in use over time."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import stat
from io import TextIOWrapper
from os import fstat
from pathlib import Path

from cotenant.core.errors import InputError
from cotenant.core.files import cannot_write

LOG = logging.getLogger(__name__)

REQUEST_COLUMNS = "service,received_s,queued_ms,batch,gpulet,executed_ms,outcome\n"
GPU_COLUMNS = "time_s,gpus_in_use,gpus_held,gpulets,allocated\n"
MOST_ROWS = 2000  # rows are written in groups of this many; a crash loses at most one group


class CsvLog:
    """Buffered text rows. A full disk ends the log, not the server. Raises InputError for a file that cannot be written
    or that another running server writes.
    """

    def __init__(self, path: Path, heading: str) -> None:
        self.path = path
        self._rows: list[str] = []
        self._file: TextIOWrapper | None = _emptied(path)
        try:
            self._file.write(heading)
            self._file.flush()
        except OSError as error:
            self._abandon()
            raise cannot_write(path, error) from None

    def add(self, row: str) -> None:
        """Add one row of text, which includes its newline, to the log."""
        self._rows.append(row)
        if len(self._rows) >= MOST_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write the buffered rows to the file."""
        if self._file is None:
            self._rows.clear()
            return
        if not self._rows:
            return
        rows, self._rows = self._rows, []
        try:
            self._file.write("".join(rows))
            self._file.flush()
        except OSError as error:
            self._abandon()
            LOG.error("%s: %s; no more rows are written", self.path, (error.strerror or str(error)).lower())

    def _abandon(self) -> None:
        broken, self._file = self._file, None
        if broken is not None:
            with contextlib.suppress(OSError):
                broken.close()

    def close(self) -> None:
        """Write the rows that are still in the buffer, and close the file."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None


def _emptied(path: Path) -> TextIOWrapper:
    """Open the file and truncate it, after locking it: a second server started by mistake must not destroy the first
    one's log.
    """
    try:
        file = path.open("a", encoding="utf-8", newline="")
    except OSError as error:
        raise cannot_write(path, error) from None
    if stat.S_ISREG(fstat(file.fileno()).st_mode):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise InputError("another running server writes this log", file=path) from None
        except OSError:
            pass  # the file system has no locks
        file.truncate(0)
    return file


def quoted(name: str) -> str:
    """Quote a name for a CSV cell if that is necessary."""
    return '"' + name.replace('"', '""') + '"' if any(c in name for c in ',"\r\n') else name
