"""`cotenant queue`: list the fleet's jobs."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def queue(
    everything: Annotated[bool, typer.Option("--all", help="Include jobs that have ended.")] = False,
    fleet: Annotated[str | None, typer.Option("--fleet", metavar="DIR|127.0.0.1:PORT", help="Which fleet.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List running and waiting jobs with their progress and why they wait."""
    import json

    from cotenant.core.folders import fleet_folder
    from cotenant.fleet.client import FleetClient

    with FleetClient(fleet or fleet_folder()) as client:
        jobs = client.call("queue", all=everything)["jobs"]
    if json_:
        print(json.dumps({"jobs": jobs}))
        return
    from cotenant.cli.fleet_view import print_queue

    print_queue(jobs, everything)
