"""The exceptions that end a command with one sentence: InputError (wrong input) and WorkError (failed operation)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
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
                self._named_field(),
            )
            if part
        )
        return f"{where}: {self.message}" if where else self.message

    def _named_field(self) -> str:
        """Return how a message names the place of the error: an option or argument by its name, a key in a file as
        `field NAME`.
        """
        field = self.field or ""
        typed = self.file is None and (field.startswith("--") or field.isupper())
        return field if typed or not field else f"field {field}"


class TakenNameError(InputError):
    """Raised if the name for something new, such as a tenant, is already in use."""


class NothingToDoError(InputError):
    """Raised if a command has no effect: the tenant to be parked is parked already, or the one to be resumed is not
    parked.
    """


class NoHostMemoryError(InputError):
    """Raised if the agent has not enough host memory left to reserve what a tenant needs for its eviction."""


class WorkError(Exception):
    """Raised if the input was valid but the operation failed (exit code 1): a full disk, a dead solver, a lost
    server."""


class LostServerError(WorkError):
    """Raised if no server answers, or its connection ended or timed out before its answer: the client's request may
    have been carried out or not.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the hint "did you mean X?" with the known name that is most like `name`; empty if none is like it."""
    import difflib

    names = {x.lower(): x for x in map(str, known)}
    near = difflib.get_close_matches(str(name)[:200].lower(), names, 1)
    return f"did you mean {names[near[0]]}?" if near else ""


def unknown_name(kind: str, name: str, known: Collection[str], field: str | None = None) -> InputError:
    """Return the InputError for a name that is not known, with the nearest known name and all of them. `kind`: what it
    should be the name of, such as ordering."""
    hint = nearest(name, known)
    said = f"unknown {kind} {str(name)[:200]!r}; {hint}{' ' * bool(hint)}known: {', '.join(known)}"
    return InputError(said, field=field)


def check_choice(value: str, known: Collection[str], field: str) -> None:
    """Raise InputError unless `value` is one of the known values of an option."""
    if value not in known:
        hint = nearest(value, known)
        raise InputError(f"{value!r} is not {' or '.join(known)}{'; ' * bool(hint)}{hint}", field=field)
