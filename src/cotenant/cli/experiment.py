"""`cotenant experiment FILE.yaml`: a server under load, both described by one file, and an analysis of the results."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from cotenant.loadgen.experiment import Outcome

app = typer.Typer(add_completion=False)


@app.command()
def experiment(
    file: Annotated[
        str | None,
        typer.Argument(help="An experiment file, or the name of a built-in one (see --list).", show_default=False),
    ] = None,
    out: Annotated[str | None, typer.Option(help="Folder of the results. Default: NAME-out.")] = None,
    duration: Annotated[str | None, typer.Option(help="Duration of the load, instead of the file's.")] = None,
    rate: Annotated[str, typer.Option(help="Factor on the planned and on the sent rates: x2.")] = "x1",
    seed: Annotated[int | None, typer.Option(min=0, help="Seed, instead of the file's.")] = None,
    replan: Annotated[
        bool | None, typer.Option(help="Let the server replan as rates change; by default the first plan is kept.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the built-in experiments.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Start a server and a client that sends it requests, stop both after the load's duration, and write the results:
    figures, an HTML report, logs of client and server. If the server keeps its plan, the same requests are also
    simulated, and the figures are compared.
    """
    import sys
    from pathlib import Path

    from cotenant.cli.load_view import live_table
    from cotenant.cli.progress import say, say_compiling_serving
    from cotenant.core.errors import InputError, WorkError
    from cotenant.loadgen.experiment import load_services, read_experiment, run_experiment, shipped

    if listing:
        rows = shipped()
        print(json.dumps(rows) if as_json else "\n".join(f"{name:<12} {title}" for name, title in rows.items()))
        return
    if file is None:
        raise InputError("name an experiment file, or one of " + ", ".join(shipped()), field="experiment")
    changes = {"duration": duration, "seed": seed, "replan": replan}
    found = read_experiment(file, {k: v for k, v in changes.items() if v is not None}, rate)
    folder = Path(out or f"{found.name}-out")
    if folder.exists() and not folder.is_dir():
        raise InputError("exists and is not a folder; choose another name", file=folder)
    names = [s.name for s in load_services(found)]
    say_compiling_serving()
    with live_table(names, found.duration_s, found.raw.title, as_json) as tell:
        outcome = run_experiment(found, folder, tell, say)
    _write(outcome, folder)
    if as_json:
        print(json.dumps(outcome.summary()))
    else:
        _show(outcome, folder)
    for warning in outcome.result.warnings():
        print(f"note: {warning}", file=sys.stderr)
    short = None if outcome.plan is None else outcome.plan.unserved
    if (short or outcome.result.fault) is not None:
        raise WorkError(short or outcome.result.fault)


def _write(outcome: Outcome, folder: Path) -> None:
    from cotenant.core.files import write_text
    from cotenant.report.load import write_page

    write_text(folder / "summary.json", json.dumps(outcome.summary(), indent=1) + "\n")
    write_page(folder / "report.html", outcome.result, outcome.experiment.raw.title)


def _show(outcome: Outcome, folder: Path) -> None:
    from cotenant.cli.load_view import show

    show(outcome.result)
    content = outcome.summary()
    for name, row in content.get("live_over_simulated", {}).items():
        simulated = content["simulated"][name]
        parts = [
            f"{p.removesuffix('_ms')} {simulated[p]:.1f} ms (live x{row[p]:.2f})" for p in row if row[p] is not None
        ]
        print(f"simulated {name}: {', '.join(parts) or 'nothing was answered'}")
    print(f"written to {folder}: summary.json, report.html, client.csv, server.csv, gpus.csv, plan.json")
