"""Prints what enforces each property of a share on a GPU, for `ps --mechanisms` and `doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cotenant.cli.fitting import to_file
from cotenant.core.strength import Strength

if TYPE_CHECKING:
    from rich.console import Console

PROMISE, BY = 12, 10  # widths of the first two columns: the property of a share, and what enforces it


def print_promises(
    console: Console, gpu: dict[str, Any], rows: list[dict[str, Any]], *, obstacles: bool = False
) -> None:
    """Print a GPU, and for each property of a share a line that says what enforces it there. `rows`: these properties,
    as `row_of` in agent/mechanisms/prospects.py describes them. `obstacles`: also print what prevents stronger
    enforcement."""
    console.print(f"GPU {gpu['index']}: {gpu['name']}, {gpu['uuid']}", style="bold", soft_wrap=True)
    console.print(f"{'  promise':<{PROMISE}}{'by':<{BY}}how", style="dim")
    for row in rows:
        nothing = row["by"] == Strength.NOTHING
        how = "" if nothing else f"--mechanism {row['mechanism']}" + (f": {row['note']}" if row["note"] else "")
        head = f"{'  ' + row['promise']:<{PROMISE}}{row['by']:<{BY}}"
        hanging(console, head, how or row["why"], "yellow" * nothing)
        # no other enforcement is stronger than the kernel's
        label = "in the way: " if row["by"] == Strength.KERNEL else "why not stronger: "
        for text in row["obstacles"] if obstacles else ():
            if text != row["why"]:
                hanging(console, f"{'':<{PROMISE}}{label}", text, "dim")


def hanging(console: Console, head: str, text: str, style: str = "") -> None:
    """Print `head` and `text` as one line. On a terminal, a text that is too long continues below its own beginning. To
    a file it is one line, for grep.
    """
    from rich.table import Table

    from cotenant.core.print_table import print_table

    if to_file():
        console.print(head + text, style=style or None, soft_wrap=True)
        return
    table = Table.grid()
    table.add_column(no_wrap=True, width=len(head))
    table.add_column(overflow="fold")
    table.add_row(head, text, style=style or None)
    print_table(console, table)
