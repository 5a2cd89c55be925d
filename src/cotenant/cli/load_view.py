"""Prints tables of a load test: a live one while the test runs, and the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cotenant.cli.fitting import figures_table, print_fitting
from cotenant.core.units import format_ms

if TYPE_CHECKING:
    from rich.table import Table

    from cotenant.loadgen.result import LoadResult
    from cotenant.loadgen.run import Progress

HEADS = ("sent", "rps", "p50 ms", "p95 ms", "p99 ms", "SLO ms", "late", "dropped", "failed", "in time")
DISPENSABLE = ("p50 ms", "sent", "p95 ms", "rps", "SLO ms", "late", "dropped", "failed")


@contextmanager
def live_table(
    names: Sequence[str], duration_s: float, what: str, quiet: bool
) -> Iterator[Callable[[Sequence[Progress]], None] | None]:
    """Yield a function that shows the progress of a load test: as a table on a terminal, else as one line per minute on
    standard error.
    """
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        yield _lines(what, duration_s)
        return
    from rich.console import Console
    from rich.live import Live

    view = Live(console=Console(stderr=True), transient=True, auto_refresh=False)
    last: dict[str, Any] = {}

    def tell(progress: Sequence[Progress]) -> None:
        view.update(_live(names, duration_s, what, progress, last), refresh=True)

    with view:
        yield tell


def _lines(what: str, duration_s: float) -> Callable[[Sequence[Progress]], None]:
    last = time.monotonic()

    def line(progress: Sequence[Progress]) -> None:
        nonlocal last
        if time.monotonic() - last >= 60:
            last = time.monotonic()
            done, now = sum(p.done for p in progress), max(p.now_s for p in progress)
            print(f"{what}: {now:.0f} of {duration_s:g} s, {done:,} answers", file=sys.stderr, flush=True)

    return line


def _live(
    names: Sequence[str], duration_s: float, what: str, progress: Sequence[Progress], last: dict[str, Any]
) -> Table:
    from rich.markup import escape

    now = max(p.now_s for p in progress)
    heads = ("sent", "answered/s", "waiting", "ok", "not ok", "mean ms", "worst ms")
    table = figures_table(f"{what}: {now:.0f} of {duration_s:g} s", "service", heads)
    for s, name in enumerate(names):
        rows = [p.services[s] for p in progress]
        sent, ok, bad, took = (sum(r[k] for r in rows) for k in range(4))
        before, then = last.get(name, (0, 0.0))
        recent = ok + bad - before
        rate = recent / (now - then) if now > then else 0.0
        table.add_row(
            escape(name), f"{sent:,}", f"{rate:,.0f}", f"{sent - ok - bad:,}", f"{ok:,}", f"{bad:,}",
            f"{took / recent:.1f}" if recent else "-", f"{max(r[4] for r in rows):.1f}" if recent else "-",
        )  # fmt: skip
        last[name] = (ok + bad, now)
    return table


def show(result: LoadResult) -> None:
    """Print the result of a load test, in the format of simulated results."""
    from rich.markup import escape

    content = result.summary()
    late = content["lateness_ms"]
    left = "" if late["p99"] is None else f", sent {late['p50']:.2f} ms late (p99 {late['p99']:.2f})"
    total = content["total"]

    def build(heads: Sequence[str]) -> Table:
        title = f"{content['requests']:,} requests in {content['duration_s']:g} s, seed {content['seed']}{left}"
        table = figures_table(title, "service", heads)
        for name, row in content["services"].items():
            table.add_row(escape(name), *(_cells(row)[head] for head in heads))
        if len(content["services"]) > 1:
            cells = _cells({**total, "answered_rps": total["rps"], "slo_ms": None})
            table.add_row("all", *(cells[head] for head in heads), style="bold")
        return table

    print_fitting(build, build, HEADS, DISPENSABLE)


def _cells(row: dict[str, Any]) -> dict[str, str]:
    times = {f"{p} ms": "-" if row[f"{p}_ms"] is None else f"{row[f'{p}_ms']:.1f}" for p in ("p50", "p95", "p99")}
    counts = {name: f"{row[name]:,}" for name in ("sent", "late", "dropped", "failed")}
    slo = "-" if row["slo_ms"] is None else format_ms(row["slo_ms"])
    share = "-" if row["slo_attainment"] is None else f"{row['slo_attainment']:.2%}"
    return {**times, **counts, "rps": f"{row['answered_rps']:,.0f}", "SLO ms": slo, "in time": share}
