"""Shows the progress of long work on standard error: a bar on a terminal, otherwise a line per minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotenant.core.cluster import Cluster
    from cotenant.core.work import Trace

Tick = Callable[[int, int], None]


def say(text: str) -> None:
    """Print one line on standard error."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def jobs_progress(what: str, total: int) -> Iterator[Tick]:
    """Yield a function (done, total) that moves a bar with an ETA, or prints a line each minute."""
    if not sys.stderr.isatty():
        last = time.monotonic()

        def line(done: int, of: int) -> None:
            nonlocal last
            if time.monotonic() - last >= 60:
                last = time.monotonic()
                say(f"{what}: {done:,} of {of:,}")

        yield line
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("elapsed"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done, of: progress.update(task, completed=done, total=of)


def say_inputs(trace: Trace, cluster: Cluster, remarks: list[str]) -> None:
    """Report on standard error which trace and cluster were read."""
    from cotenant.core.units import counted

    print(f"{counted(len(trace.jobs), 'job')} of {trace.source} on {cluster.describe()}", file=sys.stderr)
    for reason, rows in trace.left_out.items():
        print(f"  left out: {rows:,} {reason}", file=sys.stderr)
    for remark in [*trace.remarks, *remarks]:
        print(f"  note: {remark}", file=sys.stderr)


def say_compiling() -> None:
    """Print that a first run takes longer because the simulator is compiled."""
    from cotenant.policy.compiled import CACHED, is_compiled

    if not is_compiled():
        keep = "once; kept for later runs" if CACHED else "every time: the user cache folder cannot be written"
        say(f"compiling the simulator ({keep}; about 20 s)")


def say_compiling_serving() -> None:
    """Print that a planner and simulator for serving are compiled, unless they are in the compilation cache."""
    from cotenant.policy.compiled import CACHED, cache_folder

    # of the functions that every plan calls, `widen` in adjust.py is called last. Functions that only some plans need
    # are compiled at their first use, without a notice.
    if not (CACHED and any(cache_folder().rglob("adjust.widen*.nbc"))):
        say("compiling the planner and simulator for this machine, once (half a minute)")
