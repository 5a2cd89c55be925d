"""Options that set the log of commands that run until they are stopped."""

from __future__ import annotations

from typing import Annotated

import typer

LogFormat = Annotated[
    str | None, typer.Option("--log-format", metavar="text|json", help="Format of the log: text or JSON lines.")
]
LogLevel = Annotated[
    str | None,
    typer.Option("--log-level", metavar="LEVEL", help="Lowest level that is logged: debug, info, warning, error."),
]
