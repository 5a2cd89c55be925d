"""The logs of a server as CSV: one row per request of a service, and the GPUs in use over time."""

from __future__ import annotations

import contextlib
from io import TextIOWrapper
from pathlib import Path

REQUEST_COLUMNS = "service,received_s,queued_ms,batch,gpulet,executed_ms,outcome\n"
GPU_COLUMNS = "time_s,gpus_in_use,gpus_held,gpulets,allocated\n"
MOST_ROWS = 2000  # written at once, so that a crash loses little and a row costs little


class CsvLog:
    """Rows of text, written in bunches. A full disk ends the log, not the server: `fault` says so."""

    def __init__(self, path: Path, heading: str) -> None:
        self.path = path
        self.fault = ""
        self._rows: list[str] = []
        self._file: TextIOWrapper | None = path.open("w", encoding="utf-8", newline="")
        self._file.write(heading)
        self._file.flush()

    def add(self, row: str) -> None:
        """One row, with its end of line."""
        self._rows.append(row)
        if len(self._rows) >= MOST_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what has come together."""
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
            self.fault = f"{self.path}: {error.strerror}; no more rows are written"
            broken, self._file = self._file, None
            with contextlib.suppress(OSError):
                broken.close()

    def close(self) -> None:
        """Write the rest and close."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None


def quoted(name: str) -> str:
    """A name as a CSV cell."""
    return '"' + name.replace('"', '""') + '"' if any(c in name for c in ',"\r\n') else name
