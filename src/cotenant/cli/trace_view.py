"""Prints the tables of `cotenant trace`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from cotenant.cli.fitting import plain_table, print_whole
from cotenant.core.units import counted, format_seconds

MOST = 12  # largest number of rows of a distribution; one more row has the sum of the rest


def _figures(value: float) -> str:
    """Format a number with at least four significant figures and all digits before the point, grouped by three."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# key in the JSON of `trace generate` -> (label, value) in the table
SHOWN: dict[str, Callable[[Any], tuple[str, str]]] = {
    "rate_per_h": lambda value: ("requested rate", f"{_figures(value)} jobs/h"),
    "span_s": lambda value: ("last arrival", format_seconds(value)),
    "gpu_hours": lambda value: ("GPU-time", f"{_figures(value)} GPU-hours"),
    "offered_load": lambda value: ("offered load at the requested rate", f"{value:.1%}"),
    "drawn_load": lambda value: ("offered load until the last arrival", f"{value:.1%}"),
}


def show_summary(summary: dict[str, Any], elastic: Sequence[str] = ()) -> None:
    """Print what `cotenant trace inspect` found. `elastic`: names of the elastic profiles that know all its models."""
    console = Console(highlight=False)
    left_out = sum(summary["left_out"].values())
    console.print(f"[bold]{summary['source']}[/bold]", soft_wrap=True)
    console.print(f"{counted(summary['kept'], 'job')} kept, {counted(left_out, 'row')} left out")
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    facts.add_column(style="dim")
    facts.add_column()
    for reason, rows in summary["left_out"].items():
        facts.add_row("left out", f"{rows:,} {reason}")
    facts.add_row("span", format_seconds(summary["span_s"]))
    if summary["rate_per_h"] is not None:
        rate = f"{_figures(summary['rate_per_h'])} jobs/h"
        facts.add_row("arrivals", f"{rate}, gaps with CV {summary['interarrival_cv']:.3g}")
    hours = summary["gpu_hours"]
    facts.add_row("GPU-time", "-" if hours is None else f"{_figures(hours)} GPU-hours")
    if summary["with_deadline"]:
        facts.add_row("deadlines", counted(summary["with_deadline"], "job"))
    if summary["seed"] is not None:
        facts.add_row("seed", str(summary["seed"]))
    print_whole(facts, console)
    _show_durations(console, summary["duration_s"], elastic)
    for title, counts in (("GPUs", summary["gpus"]), ("model", summary["models"]), ("tenant", summary["tenants"])):
        if counts:
            _show_counts(console, title, counts)
    for remark in summary["remarks"]:
        console.print(f"[dim]note:[/dim] {remark}", soft_wrap=True)


def show_written(content: dict[str, Any]) -> None:
    """Print what `cotenant trace convert` and `generate` wrote."""
    console = Console(highlight=False)
    console.print(f"[bold]{content['out']}[/bold]: {counted(content['jobs'], 'job')}", soft_wrap=True)
    for reason, rows in content.get("left_out", {}).items():
        console.print(f"  left out: {rows:,} {reason}")
    for name, value in content.items():
        if name not in ("out", "jobs", "left_out", "remarks") and value is not None:
            label, shown = SHOWN[name](value) if name in SHOWN else (name, str(value))
            console.print(f"  [dim]{label}:[/dim] {shown}", soft_wrap=True)
    for remark in content.get("remarks", []):
        console.print(f"  [dim]note:[/dim] {remark}", soft_wrap=True)


def _show_durations(console: Console, durations: dict[str, Any], elastic: Sequence[str]) -> None:
    names = [name for name in durations if name != "unknown"]
    table = plain_table("duration", names)
    table.add_row(*(format_seconds(durations[name]) if durations[name] is not None else "-" for name in names))
    print_whole(table, console)
    if durations["unknown"]:
        why = "since the profiles of job policies lack their models"
        if elastic:
            why += f"; elastic policies know them (simulate --policy NAME --profiles {elastic[0]})"
        console.print(f"{counted(durations['unknown'], 'job')} without duration, {why}", soft_wrap=True)


def _show_counts(console: Console, title: str, counts: dict[str, int]) -> None:
    total = sum(counts.values())
    table = plain_table()
    table.add_column(title)
    table.add_column("jobs", justify="right")
    table.add_column("", justify="left", no_wrap=True)
    listed = list(counts.items())
    if len(listed) > MOST:
        listed = sorted(listed, key=lambda item: -item[1])
        rest = listed[MOST - 1 :]
        listed = [*listed[: MOST - 1], (f"{len(rest)} more", sum(n for _, n in rest))]
    for name, n in listed:
        table.add_row(name, f"{n:,}", f"{'█' * round(30 * n / total)} {n / total:.1%}")
    print_whole(table, console)
