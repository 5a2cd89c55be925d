"""Runs side by side on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cotenant.metrics.registry import METRICS, Metric, lookup
from cotenant.report.text import column_texts

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(frozen=True)
class Column:
    """One column of a table of runs: where its value stands in the summary, its heading, and the group it stands in
    where headings are grouped (then with the short heading)."""

    key: str
    head: str
    group: str
    short: str = ""

    @property
    def metric(self) -> Metric:
        return METRICS.get(self.key) or METRICS[self.key.rsplit(".", 1)[0]]


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
    Column("preemptions", "preempted", "Disruption"),
    Column("moves", "moved", "Disruption"),
    Column("jobs_completed", "jobs", "Jobs", "done"),
)
# what still fits 80 characters
NARROW = ("jct_s.mean", "jct_s.median", "jct_s.p99", "queueing_s.mean", "makespan_s", "utilisation.gpu")


def best_rows(summaries: Sequence[dict[str, Any]], column: Column) -> set[int]:
    """Rows that hold the best value as it is shown; none where all are alike or neither way is better."""
    metric = column.metric
    values = [lookup(summary, column.key) for summary in summaries]
    known = [value for value in values if value is not None]
    if metric.better == "neither" or len(known) < 2:
        return set()
    best = min(known) if metric.better == "lower" else max(known)
    shown = column_texts(values, metric.unit)
    if len(set(shown)) == 1:
        return set()
    return {i for i, text in enumerate(shown) if text == shown[values.index(best)]}


def cell_texts(summaries: Sequence[dict[str, Any]], column: Column) -> list[str]:
    """The column's cells as text, one per summary."""
    return column_texts([lookup(summary, column.key) for summary in summaries], column.metric.unit)


def runs_table(rows: Sequence[tuple[str, dict[str, Any]]], *, title: str | None = None, narrow: bool = False) -> Table:
    """A table of (label, summary); the best value of a column is green."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", no_wrap=True, style="bold")
    columns = [c for c in COLUMNS if not narrow or c.key in NARROW]
    columns = [c for c in columns if any(lookup(summary, c.key) is not None for _, summary in rows)]
    for column in columns:
        table.add_column(column.head, justify="right", no_wrap=True)
    summaries = [summary for _, summary in rows]
    best = [best_rows(summaries, column) for column in columns]
    texts = [cell_texts(summaries, column) for column in columns]
    for i, (label, _) in enumerate(rows):
        cells = [
            f"[green bold]{text[i]}[/]" if i in winners else text[i] for text, winners in zip(texts, best, strict=True)
        ]
        table.add_row(_escaped(label), *cells)
    return table


def print_runs(
    rows: Sequence[tuple[str, dict[str, Any]]], *, title: str | None = None, console: Console | None = None
) -> None:
    """Print (label, summary) side by side; fewer columns where the terminal is narrow, all where output is a file."""
    from rich.console import Console

    out = console or Console()
    if console is None and not out.is_terminal:
        out = Console(width=220)
    table = runs_table(rows, title=title)
    if out.measure(table, options=out.options.update(max_width=10_000)).maximum > out.width:
        table = runs_table(rows, title=title, narrow=True)
    out.print(table)


def _escaped(label: str) -> str:
    from rich.markup import escape

    return escape(label)
