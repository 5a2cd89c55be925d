"""`cotenant doctor`: what enforces each property of a tenant's share (time, SMs, memory, bandwidth, faults) on this
machine, how strongly, and what prevents stronger enforcement."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from cotenant.core.errors import InputError, WorkError
from cotenant.core.folders import agent_folder, own_agent_folder
from cotenant.core.strength import DEMANDABLE, Promise, Strength

app = typer.Typer(add_completion=False)

DEMAND = "|".join(Promise) + "=" + "|".join(DEMANDABLE)


@dataclass(frozen=True)
class Report:
    """What `doctor` found. `agent`: folder of the agent that answered, None if no agent runs; `release`: release of the
    NVIDIA driver."""

    agent: str | None
    release: str
    gpus: list[dict[str, Any]]
    problems: list[str]


@app.command()
def doctor(
    enforce: Annotated[
        list[str] | None,
        typer.Option(metavar=DEMAND, help="Exit with 1 unless this property is enforced at least this strongly."),
    ] = None,
    gpus: Annotated[str, typer.Option(metavar="soft|all|UUID,...", help="GPUs to examine if no agent runs.")] = "all",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    folder: Annotated[Path | None, typer.Option("--dir", help="Folder of the agent's sockets.")] = None,
) -> None:
    """Report what enforces each property of a tenant's share on this machine, how strongly, and what prevents stronger
    enforcement. Exits with 1 on a problem."""
    demands = [_demand(text) for text in enforce or ()]
    report = _examine(folder, gpus)
    report.problems.extend(_unmet(report.gpus, demands))
    if as_json:
        print(json.dumps(asdict(report)))
    else:
        _print(report)
    raise typer.Exit(1 if report.problems else 0)


def _demand(text: str) -> tuple[Promise, Strength]:
    promise, _, strength = text.partition("=")
    if promise not in tuple(Promise) or strength not in DEMANDABLE:
        raise InputError(f"{text[:40]!r} is not {DEMAND}, such as memory=driver", field="--enforce")
    return Promise(promise), Strength(strength)


def _examine(folder: Path | None, gpus: str) -> Report:
    """Ask the agent what enforces the properties of shares. If no agent runs, examine the GPUs with the rights of this
    process.
    """
    from cotenant.agent.ipc.client import ControlClient
    from cotenant.devices.registry import device_named
    from cotenant.native.libraries import DRIVER_SHIM, library_path

    problems = []
    try:
        library_path(DRIVER_SHIM)
    except InputError as error:
        problems.append(f"programs cannot be made tenants: {error}")
    kind = device_named(gpus)
    release = "" if kind.simulated else kind.release()
    try:
        where = folder or agent_folder()
        with ControlClient(where) as client:
            return Report(str(where), release, client.call("mechanisms")["gpus"], problems)
    except WorkError as error:
        problems.append(str(error))
    try:
        found = _look(gpus, folder)
    except WorkError as error:
        problems.insert(0, str(error))
        found = []
    return Report(None, release, found, problems)


def _look(gpus: str, folder: Path | None) -> list[dict[str, Any]]:
    """Examine the GPUs in the way an agent of this user would. Raises WorkError if there is no GPU."""
    from cotenant.agent.mechanisms.prospects import find, row_of, strongest
    from cotenant.devices.registry import discover

    mine = folder or own_agent_folder()
    return [
        {
            "uuid": gpu.uuid,
            "index": gpu.index,
            "name": gpu.name,
            "prospects": [row_of(*each) for each in strongest(find(gpu, mine))],
        }
        for gpu in discover(gpus.split(","))
    ]


def _unmet(gpus: list[dict[str, Any]], demands: list[tuple[Promise, Strength]]) -> list[str]:
    """Return a sentence for each demand that a GPU does not meet, with the reason."""
    return [
        f"GPU {gpu['index']}: {row['promise']} is enforced by {row['by']}, not by {strength} as demanded: {row['why']}"
        for gpu in gpus
        for promise, strength in demands
        for row in gpu["prospects"]
        if row["promise"] == promise and not Strength(row["by"]).at_least(strength)
    ]


def _print(report: Report) -> None:
    from rich.console import Console

    from cotenant.cli.prospect_view import hanging, print_promises

    console = Console(highlight=False, soft_wrap=True, markup=False)
    by = f"the agent in {report.agent}" if report.agent else "this user, without an agent"
    if report.gpus:
        console.print(f"found by {by}" + (f"; driver {report.release}" if report.release else ""), style="dim")
    for gpu in report.gpus:
        print_promises(console, gpu, gpu["prospects"], obstacles=True)
    for text in report.problems:
        hanging(console, "problem: ", text, "red")
    if not report.problems:
        console.print("no problem was found: tenants can run", style="green")
