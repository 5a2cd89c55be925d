"""`cotenant compare`: shows the results of several runs side by side, as a table, as JSON or as one HTML page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs, or folders that contain runs.", metavar="DIR...")
    ],
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a self-contained HTML page with every chart.")
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="Title of the page.")] = None,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", help="Label of the policy against which the page compares each job's time."),
    ] = None,
    profiles: Annotated[
        Path | None, typer.Option("--profiles", help="Profile file that assigns models to classes.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare any number of runs, as a table or one HTML page."""
    from cotenant.core.files import check_writable
    from cotenant.core.record.reader import find_records, read_record
    from cotenant.profiles.training.tables import load_profiles
    from cotenant.report.runs import arrange, in_order, run_of, unlike_note

    # a run's folder that is found under two arguments counts for the first of them
    folders = {folder: given for given in reversed(runs) for folder in find_records(given)}
    check_writable(html)
    families = {model.name: model.family for model in load_profiles(profiles).models.values()}
    found = arrange([run_of(read_record(folder), families) for folder in _shown(list(folders))])
    # the folders given as arguments keep their order; the runs in one of them are sorted by policy and by the
    # options in which they differ, because a sweep names the folders of its runs by hashes
    found = [
        run
        for given in dict.fromkeys(runs)
        for run in in_order([r for r in found if r.path and folders[r.path] == given])
    ]
    if html is not None:
        from cotenant.report.page import write_page

        write_page(html, found, title or (found[0].label if len(found) == 1 else "Comparison of runs"), baseline)
    unlike = unlike_note(found)
    if json_:
        import orjson

        entries = [
            {
                "path": str(run.path),
                "label": run.label,
                "seed": run.info.seed,
                "trace": run.info.trace.get("source"),
                "cluster": run.info.cluster.get("description"),
                "options": run.info.options,
                **run.summary,
            }
            for run in found
        ]
        answer = {"runs": entries, "note": unlike, "html": None if html is None else str(html)}
        print(orjson.dumps(answer, option=orjson.OPT_INDENT_2).decode())
        return
    from cotenant.report.runs import energy_note, moves_note
    from cotenant.report.table import print_runs

    pairs = [(run.info, run.summary) for run in found]
    labelled = [(run.label, run.summary) for run in found]
    print_runs(labelled, moves_note=moves_note(pairs), energy_note=energy_note(pairs))
    if unlike is not None:
        typer.echo(f"note: {unlike}")
    if html is not None:
        typer.echo(f"{html}: open it in a browser; it needs no network")


def _shown(folders: list[Path]) -> Iterable[Path]:
    """Yield the folders of the runs to compare, with a progress bar if there are several and output goes to a terminal.
    """
    import sys

    if len(folders) < 4 or not sys.stderr.isatty():
        return folders
    from rich.console import Console
    from rich.progress import track

    return track(folders, "reading runs", console=Console(stderr=True), transient=True)
