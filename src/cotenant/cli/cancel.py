"""`cotenant cancel`: take jobs back."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def cancel(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of jobs, as cotenant queue lists them.")],
    fleet: Annotated[str | None, typer.Option("--fleet", metavar="DIR|127.0.0.1:PORT", help="Which fleet.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Cancel jobs: those that wait at once, those that run after their grace. They do not come back."""
    import json

    from cotenant.fleet.client import FleetClient, default_folder
    from cotenant.model.errors import InputError

    answers, wrong = [], None
    with FleetClient(fleet or default_folder()) as client:
        for job in ids:
            try:
                answers.append(client.call("cancel", id=job))
            except InputError as error:  # the others are taken back all the same
                wrong = wrong or error
    if json_:
        print(json.dumps({"jobs": answers}))
    else:
        for answer in answers:
            print(f"{answer['id']}: {answer['state']}")
    if wrong is not None:
        raise wrong
