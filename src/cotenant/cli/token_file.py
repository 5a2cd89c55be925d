"""`--token FILE`: the bearer token that a command shows to a server. In a file, because others see command lines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cotenant.core.errors import InputError

TokenFile = Annotated[Path | None, typer.Option("--token", metavar="FILE", help="File with the bearer token to show.")]


def shown_token(path: Path | None) -> str | None:
    """The first line that is neither empty nor a comment, as in a server's own file of tokens. InputError without."""
    if path is None:
        return None
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        # a token given by itself must not end up in a terminal's or a log's sentence
        raise InputError(
            f"names the file that holds the token; it cannot be read: {(error.strerror or 'no').lower()}",
            field="--token",
        ) from None  # fmt: skip
    except (UnicodeDecodeError, ValueError):
        raise InputError("is not a text", file=path, field="--token") from None
    found = next((line for line in lines if line and not line.startswith("#")), "")
    if not found or not found.isprintable() or " " in found:
        raise InputError("has no token: one line without spaces", file=path, field="--token")
    return found
