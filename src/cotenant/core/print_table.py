"""Prints tables of the library rich. In a file, lines have no trailing spaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_table(console: Console, table: Table) -> None:
    """Print a table; a file gets neither trailing spaces nor an empty first line."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    console.out("\n".join(lines).strip("\n"), highlight=False)
