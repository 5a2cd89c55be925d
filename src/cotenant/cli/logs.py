"""`cotenant logs`: print the output of a job of the fleet."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False)
POLL_S = 0.2


@app.command()
def logs(
    job: Annotated[str, typer.Argument(metavar="ID", help="Job id.")],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing until the job has ended.")] = False,
    attempt: Annotated[int | None, typer.Option(help="Number of the start, from 0 (default: the last).")] = None,
    rank: Annotated[int, typer.Option(help="Rank of a gang's process.")] = 0,
    tail: Annotated[int | None, typer.Option(help="Print only this many bytes from the end.")] = None,
    fleet: Annotated[str | None, typer.Option("--fleet", metavar="DIR|127.0.0.1:PORT", help="Which fleet.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print a job's output; -f follows it across restarts until the job has ended."""
    import json
    import sys
    import time

    from cotenant.core.folders import fleet_folder
    from cotenant.fleet.client import FleetClient

    said: list[str] = []
    offset, current = -(tail or 0), attempt
    with FleetClient(fleet or fleet_folder()) as client:
        while True:
            answer = client.call("log", id=job, attempt=current, rank=rank, offset=offset)
            offset = answer["next"]
            if answer["text"]:
                said.append(answer["text"])
                if not json_:
                    sys.stdout.write(said.pop())
                    sys.stdout.flush()
                continue
            if not follow:
                break
            if current is None and answer["attempt"] >= 0:
                current = answer["attempt"]  # the job has been started: follow this attempt
            if not answer["attempt_open"] and current is not None:
                newest = client.call("log", id=job, rank=rank)["attempt"]
                if attempt is None and newest > current:
                    current, offset = newest, 0
                    continue
                if attempt is not None or not answer["open"]:
                    break
            elif not answer["open"]:
                break
            time.sleep(POLL_S)
    if json_:
        print(json.dumps({"id": job, "attempt": answer["attempt"], "text": "".join(said)}))
