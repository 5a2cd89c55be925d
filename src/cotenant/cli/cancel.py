"""`cotenant cancel`: cancel jobs of the fleet."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def cancel(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Job ids, as `cotenant queue` lists them.")],
    fleet: Annotated[str | None, typer.Option("--fleet", metavar="DIR|127.0.0.1:PORT", help="Which fleet.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Cancel jobs. Waiting jobs end at once, running jobs within their grace time; a cancelled job is not restarted."""
    import json

    from cotenant.core.errors import InputError
    from cotenant.core.folders import fleet_folder
    from cotenant.fleet.client import FleetClient

    with FleetClient(fleet or fleet_folder()) as client:
        answers = client.call("cancel", ids=ids)["jobs"]
    done = [answer for answer in answers if "error" not in answer]
    wrong = [answer for answer in answers if "error" in answer]
    if json_:
        print(json.dumps({"jobs": done}))
    else:
        for answer in done:
            print(f"{answer['id']}: {answer['state']}")
    if wrong:  # the jobs whose ids are valid have been cancelled although others are wrong
        more = f" (and {len(wrong) - 1:,} more of the ids are unknown)" if len(wrong) > 1 else ""
        raise InputError(wrong[0]["error"] + more, field=wrong[0]["field"])
