"""Prints tables that drop whole columns on a narrow terminal, instead of cutting figures, and name the dropped columns.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cotenant.core.print_table import print_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

Build = Callable[[Sequence[str]], "Table"]
FILE_WIDTH = 220


def table_width(table: Table) -> int:
    """Return the width, in terminal columns, of a table without folded cells."""
    from rich.console import Console

    console = Console(width=10_000)
    return console.measure(table).maximum


def fit(build: Build, heads: Sequence[str], dispensable: Sequence[str], width: int) -> tuple[Table, list[str]]:
    """Return the table `build(heads)` with as many columns as fit into `width`, and the heads that were dropped, in the
    order of the table. `dispensable`: heads that may be dropped; the first of them are dropped first. If none is left
    to drop, the table stays too wide.
    """
    left_out: list[str] = []
    table = build(heads)
    for head in dispensable:
        if table_width(table) <= width:
            break
        if head in heads:
            left_out.append(head)
            table = build([h for h in heads if h not in left_out])
    return table, [h for h in heads if h in left_out]


def flowing(parts: Sequence[Text], width: int | None) -> Text:
    """Join texts with three spaces. Line breaks are possible only between the texts."""
    from rich.text import Text

    line = Text()
    room = 0
    for part in parts:
        if line and width is not None and part.cell_len + 3 > room:
            line.append("\n")
            room = width
        elif line:
            line.append("   ")
            room -= 3
        else:
            room = width or 0
        line.append_text(part)
        room -= part.cell_len
    return line


def plain_table(title: str | None = None, heads: Sequence[str] = (), left: Sequence[str] = ()) -> Table:
    """Return a new table without a frame, with a line below its head, and with these columns. Columns are aligned to
    the right, except those in `left`.
    """
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right")
    return table


def figures_table(title: str, first: str, heads: Sequence[str]) -> Table:
    """Return a new table of figures: a column for names, which may be folded, then `heads`, aligned to the right."""
    table = plain_table(title)
    table.add_column(first, overflow="fold")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def to_file() -> bool:
    """Whether output goes to a file or pipe and the user set no width for tables."""
    return not sys.stdout.isatty() and "COLUMNS" not in os.environ


def print_whole(table: Table, console: Console | None = None) -> None:
    """Print all columns of a table. If the output goes to a file or pipe, cells are not folded, and lines have no
    trailing spaces."""
    from rich.console import Console

    console = console or Console()
    print_table(Console(width=max(FILE_WIDTH, table_width(table))) if to_file() else console, table)


def print_fitting(build: Build, narrow: Build, heads: Sequence[str], dispensable: Sequence[str]) -> None:
    """Print `build(heads)`; if it does not fit, print `narrow` with as many heads as fit and name the dropped columns.
    If the output goes to a file or pipe, all columns are printed.
    """
    from rich.console import Console

    console = Console()
    if to_file():
        console = Console(width=max(FILE_WIDTH, table_width(build(heads))))
    whole = build(heads)
    table, left_out = (
        (whole, []) if table_width(whole) <= console.width else fit(narrow, heads, dispensable, console.width)
    )
    print_table(console, table)
    if left_out:
        text = f"left out at {console.width} columns: {', '.join(left_out)}; a wider terminal shows them"
        console.print(text, style="dim", highlight=False)
