"""Options of commands that run until they are stopped: how they log."""

from __future__ import annotations

from typing import Annotated

import typer

LogFormat = Annotated[
    str | None, typer.Option("--log-format", metavar="text|json", help="Lines of the log: text, or a JSON object each.")
]
LogLevel = Annotated[
    str | None,
    typer.Option("--log-level", metavar="LEVEL", help="Lowest level that is logged: debug, info, warning, error."),
]
