"""`cotenant schema`: the JSON Schema of a kind of file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def schema(
    kind: Annotated[
        str | None, typer.Argument(help="Kind of file (default: list the kinds).", metavar="[KIND]", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write; by default standard output.")] = None,
) -> None:
    """Print the JSON Schema of a file that you write, so that an editor completes and checks its settings."""
    import json

    from cotenant.api import file_formats

    if kind is None:
        for name, form in file_formats.FORMATS.items():
            print(f"{name:10}  {form.title}: {form.command}")
        return
    text = json.dumps(file_formats.schema(kind), indent=2, allow_nan=False) + "\n"
    if out is None:
        print(text, end="")
        return
    from cotenant.core.files import write_text

    write_text(out, text)
