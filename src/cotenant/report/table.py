"""Prints tables of runs and their metrics on the terminal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cotenant.core.metrics.registry import METRICS, Metric, lookup
from cotenant.report.text import column_texts

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(frozen=True)
class Column:
    """One column of a table of runs: the key of its value in the summary, its heading, and, if headings are grouped,
    its group and short heading.
    """

    key: str
    head: str
    group: str
    short: str = ""

    @property
    def metric(self) -> Metric:
        return METRICS.get(self.key) or METRICS[self.key.rsplit(".", 1)[0]]

    @property
    def better(self) -> str:
        """Return which value of the column is better when runs are compared: "higher", "lower" or "neither".
        Utilisation has "neither", because a run in which the same jobs are slower uses the GPUs more.
        """
        return "neither" if self.key.startswith("utilisation.") else self.metric.better


COLUMNS: tuple[Column, ...] = (
    Column("jct_s.mean", "JCT mean", "Completion time", "mean"),
    Column("jct_s.median", "median", "Completion time"),
    Column("jct_s.p95", "p95", "Completion time"),
    Column("jct_s.p99", "p99", "Completion time"),
    Column("jct_s.p999", "p99.9", "Completion time"),
    Column("queueing_s.mean", "queueing", "Per job, mean"),
    Column("slowdown.mean", "slowdown", "Per job, mean"),
    Column("ftf_rho.mean", "ρ", "Per job, mean"),
    Column("makespan_s", "makespan", "Cluster"),
    Column("utilisation.gpu", "GPU", "Cluster"),
    Column("utilisation.cpu", "CPU", "Cluster"),
    Column("utilisation.memory", "memory", "Cluster"),
    Column("fragmentation", "fragmented", "Cluster", "frag."),
    Column("energy.total_j", "energy", "Cluster"),
    Column("preemptions", "preempted", "Disruption"),
    Column("moves", "moved", "Disruption"),
    Column("jobs_completed", "jobs", "Jobs", "done"),
)
# columns that are left out if the table is too wide, beginning with the last one
BY_IMPORTANCE = (
    "jct_s.mean", "queueing_s.mean", "jct_s.p99", "makespan_s", "jct_s.median", "utilisation.gpu", "slowdown.mean",
    "utilisation.cpu", "ftf_rho.mean", "jct_s.p95", "preemptions", "moves", "fragmentation", "utilisation.memory",
    "jobs_completed", "energy.total_j", "jct_s.p999",
)  # fmt: skip
LABEL_WIDTH = 20  # a label that is longer than this is wrapped before a column is left out


def best_rows(summaries: Sequence[dict[str, Any]], column: Column) -> set[int]:
    """Return the rows whose displayed value in the column is best; none if all values are equal, or if neither larger
    nor smaller is better.
    """
    values = [lookup(summary, column.key) for summary in summaries]
    known = [value for value in values if value is not None]
    if column.better == "neither" or len(known) < 2:
        return set()
    best = min(known) if column.better == "lower" else max(known)
    shown = column_texts(values, column.metric.unit)
    if len(set(shown)) == 1:
        return set()
    return {i for i, text in enumerate(shown) if text == shown[values.index(best)]}


def cell_texts(summaries: Sequence[dict[str, Any]], column: Column) -> list[str]:
    """Return the texts of the column's cells, one per summary."""
    return column_texts([lookup(summary, column.key) for summary in summaries], column.metric.unit)


def known_columns(summaries: Sequence[dict[str, Any]]) -> list[Column]:
    """Return the columns that hold a value in any of the summaries."""
    return [c for c in COLUMNS if any(lookup(summary, c.key) is not None for summary in summaries)]


def runs_table(
    rows: Sequence[tuple[str, dict[str, Any]]],
    *,
    title: str | None = None,
    columns: Sequence[Column] | None = None,
    label_width: int | None = None,
) -> Table:
    """Return a table of (label, summary); the best value of a column is green. Labels longer than `label_width` are
    wrapped; numbers never are.
    """
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", style="bold", width=label_width, no_wrap=label_width is None, overflow="fold")
    summaries = [summary for _, summary in rows]
    columns = known_columns(summaries) if columns is None else columns
    for column in columns:
        table.add_column(column.head, justify="right", no_wrap=True)
    best = [best_rows(summaries, column) for column in columns]
    texts = [cell_texts(summaries, column) for column in columns]
    for i, (label, _) in enumerate(rows):
        cells = [
            f"[green bold]{text[i]}[/]" if i in winners else text[i] for text, winners in zip(texts, best, strict=True)
        ]
        table.add_row(_escaped(label), *cells)
    return table


def turned_table(
    rows: Sequence[tuple[str, dict[str, Any]]], columns: Sequence[Column], *, title: str | None = None
) -> Table:
    """Return a table of runs like `runs_table`, but with a row per figure and a column per run, which suits few runs on
    a narrow terminal.
    """
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", style="bold", no_wrap=True)
    for label, _ in rows:
        width = min(len(label), LABEL_WIDTH)
        table.add_column(_escaped(label), justify="right", min_width=width, max_width=LABEL_WIDTH, overflow="fold")
    summaries = [summary for _, summary in rows]
    for column in columns:
        winners = best_rows(summaries, column)
        texts = cell_texts(summaries, column)
        cells = [f"[green bold]{text}[/]" if i in winners else text for i, text in enumerate(texts)]
        table.add_row(column.head, *cells)
    return table


def print_runs(
    rows: Sequence[tuple[str, dict[str, Any]]],
    *,
    title: str | None = None,
    moves_note: str | None = None,
    energy_note: str | None = None,
    console: Console | None = None,
) -> None:
    """Print (label, summary) as a table; `moves_note` is printed below it if moves are shown, and so is
    `energy_note`.

    If the terminal is too narrow for all columns, few runs are printed as columns, with a row per figure. For more
    runs long labels are wrapped and columns left out, as a line below the table says. Output to a file has every
    column, unless the environment variable COLUMNS is set.
    """
    from rich.console import Console

    from cotenant.core.print_table import print_table

    out = console or Console()
    columns = known_columns([summary for _, summary in rows])
    if console is None and not out.is_terminal and "COLUMNS" not in os.environ:
        out = Console(width=max(220, _width(out, runs_table(rows, columns=columns))))
    turned = turned_table(rows, columns, title=title)
    if _width(out, runs_table(rows, columns=columns)) > out.width >= _width(out, turned):
        print_table(out, turned)
        fitting = columns
    else:
        fitting, label_width = _fit(out, rows, columns)
        print_table(out, runs_table(rows, title=title, columns=fitting, label_width=label_width))
    left_out = [c.head for c in columns if c not in fitting]
    if left_out:
        where = f"left out at {out.width} columns: {', '.join(left_out)}"
        out.print(f"{where}; a wider terminal and the HTML report have them", style="dim", highlight=False)
    if moves_note and any(c.key == "moves" for c in fitting):
        out.print(_escaped(moves_note), style="dim", highlight=False)
    if energy_note:
        out.print(_escaped(energy_note), style="dim", highlight=False)


def _fit(
    console: Console, rows: Sequence[tuple[str, dict[str, Any]]], columns: list[Column]
) -> tuple[list[Column], int | None]:
    """Return as many columns as fit the console, and the width that is left for labels; None: no label is wrapped."""
    longest = max([3, *(len(label) for label, _ in rows)])
    ranked = sorted(columns, key=lambda c: BY_IMPORTANCE.index(c.key))
    for n in range(len(ranked), 0, -1):
        kept = [c for c in columns if c in ranked[:n]]
        spare = console.width - _width(console, runs_table(rows, columns=kept)) + longest
        if spare >= longest:
            return kept, None
        if spare >= LABEL_WIDTH or (n == 1 and spare >= 3):
            return kept, spare
    return ranked[:1], 3


def _width(console: Console, table: Table) -> int:
    return console.measure(table, options=console.options.update(max_width=10_000)).maximum


def _escaped(label: str) -> str:
    from rich.markup import escape

    return escape(label)
