"""The exceptions that end a command with one sentence: InputError (wrong input) and WorkError (failed operation)."""

from __future__ import annotations

from pathlib import Path


class InputError(Exception):
    """Input that the user can correct; the command line prints it as one sentence and exits with 2.

    `message` says what is wrong and what would be right. `file`, `line` (1-based) and `field` say where.
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
    """The input was valid but the operation failed (exit code 1): a full disk, a dead solver, a lost server."""
