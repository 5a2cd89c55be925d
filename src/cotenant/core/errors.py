"""The one exception for wrong input: a sentence with file, line and field."""

from __future__ import annotations

from pathlib import Path


class InputError(Exception):
    """Input that a person can correct; the command line prints it as one sentence and exits with 2.

    `message` says what was wrong and what would be right. `file`, `line` (1-based) and `field` say where.
    """

    def __init__(
        self, message: str, *, file: str | Path | None = None, line: int | None = None, field: str | None = None
    ) -> None:
        self.message = message
        self.file = None if file is None else str(file)
        self.line = line
        self.field = field
        super().__init__(str(self))

    def __str__(self) -> str:
        where = ", ".join(
            part
            for part in (
                self.file or "",
                f"line {self.line}" if self.line is not None else "",
                f"field {self.field}" if self.field else "",
            )
            if part
        )
        return f"{where}: {self.message}" if where else self.message


class WorkError(Exception):
    """The input was fine but the work failed (exit code 1): a full disk, a solver that died, a lost server."""
