"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cotenant.core.errors import InputError

SEARCH = "Search"

LogFormat = Annotated[
    str | None, typer.Option("--log-format", metavar="text|json", help="Format of the log: text or JSON lines.")
]
LogLevel = Annotated[
    str | None,
    typer.Option("--log-level", metavar="LEVEL", help="Lowest level that is logged: debug, info, warning, error."),
]
# a token is read from a file, since other users can see command lines
TokenFile = Annotated[Path | None, typer.Option("--token", metavar="FILE", help="File with the bearer token to send.")]
Tolerance = Annotated[
    str,
    typer.Option(
        help="End the search when the largest factor met and the smallest one missed differ by less than this.",
        rich_help_panel=SEARCH,
    ),
]
PlannedScheme = Annotated[
    str | None,
    typer.Option(
        metavar="SCHEME|none",
        help="Plan as serve --colocation does: latency-sensitive and other services on separate GPUs.",
    ),
]


def shown_token(path: Path | None) -> str | None:
    """Return the token: the first line that is neither empty nor a comment, as in a server's token file. Raises
    InputError if there is none.
    """
    if path is None:
        return None
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        # the value may be the token itself, given by mistake, so it must never be printed on a terminal or in a log
        raise InputError(
            f"the file with the token cannot be read: {(error.strerror or 'no').lower()}",
            field="--token",
        ) from None  # fmt: skip
    except (UnicodeDecodeError, ValueError):
        raise InputError("is not a text file", file=path, field="--token") from None
    found = next((line for line in lines if line and not line.startswith("#")), "")
    if not found or not found.isprintable() or " " in found:
        raise InputError("contains no token: one line without spaces", file=path, field="--token")
    return found
