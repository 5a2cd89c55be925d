"""Tables that keep every figure whole: what does not fit the width is left out by column, and said."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

Build = Callable[[Sequence[str]], "Table"]
FILE_WIDTH = 220


def table_width(table: Table) -> int:
    """The columns of a terminal that a table wants, with nothing folded."""
    from rich.console import Console

    console = Console(width=10_000)
    return console.measure(table).maximum


def fit(build: Build, heads: Sequence[str], dispensable: Sequence[str], width: int) -> tuple[Table, list[str]]:
    """The table `build(heads)` with as many columns as `width` holds, and the heads left out in their order.

    `dispensable`: heads that may go, the first one first. Where none is left to go, the rest stands as it is.
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


def to_file() -> bool:
    """Whether what is printed goes to a file or a pipe whose width nobody set."""
    return not sys.stdout.isatty() and "COLUMNS" not in os.environ


def print_fitting(build: Build, narrow: Build, heads: Sequence[str], dispensable: Sequence[str]) -> None:
    """Print `build(heads)`, where it does not fit `narrow` with as many heads as do, and name the columns left out; a
    file or pipe gets them all."""
    from rich.console import Console

    console = Console()
    if to_file():
        console = Console(width=max(FILE_WIDTH, table_width(build(heads))))
    whole = build(heads)
    table, left_out = (
        (whole, []) if table_width(whole) <= console.width else fit(narrow, heads, dispensable, console.width)
    )
    console.print(table)
    if left_out:
        text = f"left out at {console.width} columns: {', '.join(left_out)}; a wider terminal has them"
        console.print(text, style="dim", highlight=False)
