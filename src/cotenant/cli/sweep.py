"""`cotenant sweep`: simulate every combination of a sweep file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cotenant.core.units import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotenant.report.runs import Run
    from cotenant.sim.jobs.sweep import Ran

app = typer.Typer(add_completion=False)


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="Sweep file: options, some with several values.", metavar="FILE.yaml")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the runs and their report.")],
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Number of runs at once (default: one per core).")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address", metavar="RAY", help="Ray cluster to run on, HOST:PORT or auto (default: this machine)."
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Report page (default: report.html in --out).")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE that overrides the file's, such as --set seed=[1,2]. Repeatable."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate every combination of a sweep file on all cores. Run again after an interruption, it continues where it
    stopped.

    With --address it runs on all cores of a Ray cluster, and repeats the runs of a machine that is lost.
    """
    from cotenant.cli.progress import jobs_progress, say_compiling
    from cotenant.cli.simulate import check_outputs
    from cotenant.core.record.reader import read_record
    from cotenant.profiles.training.tables import load_profiles
    from cotenant.report.page import write_page
    from cotenant.report.runs import arrange, moves_note, run_of
    from cotenant.sim.jobs.sweep import run_sweep
    from cotenant.sim.jobs.sweep_file import read_sweep

    plan = read_sweep(file, changes or ())
    page = html or out / "report.html"
    check_outputs(out, html, holds="runs")
    try:
        with jobs_progress(f"{plan.title}: runs", len(plan)) as tick:
            ran = run_sweep(
                plan, out, file.parent, workers=workers, address=address, progress=tick, on_ready=say_compiling
            )
    except KeyboardInterrupt:
        text = f"interrupted; finished runs are in {out}, run the same command to continue"
        print(f"cotenant: {text}", file=sys.stderr)
        sys.exit(130)  # a typer.Exit of 130 would have the entry point say "interrupted" once more
    families = {model.name: model.family for model in load_profiles().models.values()}
    runs = arrange([run_of(read_record(folder), families) for folder in ran.folders])
    write_page(page, runs, plan.title)
    if json_:
        import orjson

        entries = [
            {"label": r.label, "path": str(r.path), "seed": r.info.seed, "options": r.info.options, **r.summary}
            for r in runs
        ]
        failed = [{"options": point, "error": str(error)} for point, error in ran.failed]
        content = {"title": plan.title, "runs": entries, "failed": failed, "html": str(page)}
        sys.stdout.write(orjson.dumps(content, default=str).decode() + "\n")
        _say_lacks(ran, runs)
        return
    from cotenant.report.table import print_runs

    note = moves_note((run.info, run.summary) for run in runs)
    print_runs([(run.label, run.summary) for run in runs], title=plan.title, moves_note=note)
    typer.echo(f"wrote {page}")
    _say_lacks(ran, runs)


def _say_lacks(ran: Ran, runs: Sequence[Run]) -> None:
    """Name the failed runs and those with unfinished jobs on standard error; if there are any, exit with 1."""
    lacks = [
        f"the run with {', '.join(f'{name}: {value}' for name, value in point.items())} failed: {error}"
        for point, error in ran.failed
    ]
    lacks += [
        f"the run {run.label} left {counted(run.summary['jobs_unfinished'], 'job')} unfinished"
        for run in runs
        if run.summary["jobs_unfinished"]
    ]
    for line in lacks:
        typer.echo(f"cotenant: {line}", err=True)
    if lacks:
        raise typer.Exit(1)
