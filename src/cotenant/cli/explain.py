"""`cotenant explain`: what happened to one job and why, or a whole run as a trace for Perfetto."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def explain(
    run: Annotated[Path, typer.Argument(help="Folder of a run or of a fleet, or the id of a live job.", metavar="RUN")],
    job: Annotated[
        str | None, typer.Argument(help="Job id; without it, unusual jobs are listed.", metavar="JOB")
    ] = None,
    every_event: Annotated[
        bool, typer.Option("--every-event", help="Print one line per event, without summarising repetitions.")
    ] = False,
    perfetto: Annotated[
        Path | None,
        typer.Option("--perfetto", help="Write the run as a trace for ui.perfetto.dev or chrome://tracing."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tell in sentences when and why a job waited, ran and was moved."""
    from cotenant.cli.fleet_jobs import record_at
    from cotenant.report.explain import explain as explain_job
    from cotenant.report.explain import notable_jobs

    record, job, error = record_at(run, job)
    story = explain_job(record, job, every_event) if job is not None else None
    slices = None
    if perfetto is not None:
        from cotenant.report.perfetto import write_perfetto

        slices = write_perfetto(record, perfetto)
    if json_:
        import orjson

        notable = [] if story else [{"job": name, "why": why} for name, why in notable_jobs(record)]
        answer = (
            story.to_dict() | ({"error": error} if error else {})
            if story
            else {"run": record.info.label, "notable": notable}
        )
        if slices is not None:
            answer |= {"perfetto": str(perfetto), "slices": slices}
        print(orjson.dumps(answer, option=orjson.OPT_INDENT_2).decode())
        return
    if story is not None:
        lines = [*story.lines(), *([f"  its last start: {error}"] if error else [])]
        print("\n".join(_folded(lines) if sys.stdout.isatty() else lines))
    elif slices is None:
        found = notable_jobs(record)
        print(f"Unusual jobs of {record.info.label} (cotenant explain {run} JOB):")
        for name, why in found:
            print(f"  {name:<{max(len(other) for other, _ in found)}}  {why}")
    if slices is not None:
        print(f"{slices:,} slices in {perfetto}; open it at ui.perfetto.dev or chrome://tracing")


def _folded(lines: list[str]) -> list[str]:
    """Wrap the lines of a job's history at the width of the terminal. A continued line is indented to where the text
    begins, to the right of the times.
    """
    import shutil
    import textwrap

    width = shutil.get_terminal_size().columns
    folded = []
    for line in lines:
        time, gap, text = line.rpartition("  ")
        folded += textwrap.wrap(text, width, initial_indent=time + gap, subsequent_indent=" " * len(time + gap)) or [""]
    return folded
