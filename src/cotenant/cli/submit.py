"""`cotenant submit`: submit a job to the fleet, from a file or from options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cotenant.core.errors import InputError

app = typer.Typer(add_completion=False)

Text = str | None


@app.command(context_settings={"allow_interspersed_args": True})
def submit(
    what: Annotated[
        list[str] | None, typer.Argument(metavar="[JOB.yaml] [-- CMD...]", help="A job file, or -- and a command.")
    ] = None,
    name: Annotated[Text, typer.Option(help="Name of the job (default: its program's).")] = None,
    gpus: Annotated[int | None, typer.Option(help="Number of whole GPUs, all started together (default: 1).")] = None,
    share: Annotated[Text, typer.Option(metavar="30%", help="Share of one GPU instead of whole GPUs.")] = None,
    slice_: Annotated[Text, typer.Option("--slice", metavar="2g", help="MIG profile instead of whole GPUs.")] = None,
    cpus: Annotated[float | None, typer.Option(help="Largest number of cores that the whole job can use.")] = None,
    memory: Annotated[
        Text, typer.Option(metavar="8GiB", help="Largest amount of memory that the whole job can use.")
    ] = None,
    model: Annotated[Text, typer.Option(help="Name of the model whose profile describes the job.")] = None,
    profile: Annotated[
        Text, typer.Option(metavar="F.json", help="Profile file written by cotenant profile job.")
    ] = None,
    duration: Annotated[
        Text, typer.Option(metavar="2h", help="Run time of the job alone, for orderings that use it.")
    ] = None,
    priority: Annotated[int | None, typer.Option(help="Priority: a job with a larger value goes first.")] = None,
    tenant: Annotated[Text, typer.Option(help="Tenant to which the job belongs.")] = None,
    retries: Annotated[int | None, typer.Option(help="Largest number of restarts after failures.")] = None,
    grace: Annotated[Text, typer.Option(help="Time that the job may take to save its state and end.")] = None,
    processes: Annotated[
        Text, typer.Option(metavar="gpu|node", help="Processes of a gang: one per GPU or per node.")
    ] = None,
    env: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Environment; repeatable.")] = None,
    workdir: Annotated[Text, typer.Option(help="Working folder (default: the current one, or the file's).")] = None,
    count: Annotated[int, typer.Option(help="Number of identical jobs to submit.")] = 1,
    fleet: Annotated[Text, typer.Option("--fleet", metavar="DIR|127.0.0.1:PORT", help="Which fleet.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Submit a job: `cotenant submit job.yaml`, or `cotenant submit --gpus 1 -- python train.py`. Prints its id."""
    import json

    from cotenant.core.folders import fleet_folder
    from cotenant.fleet.client import FleetClient
    from cotenant.fleet.jobs import job_from_values, read_job_file

    words = list(what or ())
    options = {
        "name": name, "gpus": gpus, "share": share, "slice": slice_, "cpus": cpus, "memory": memory, "model": model,
        "profile": profile, "duration": duration, "priority": priority, "tenant": tenant, "retries": retries,
        "grace": grace, "processes": processes, "workdir": workdir, "env": _environment(env),
    }  # fmt: skip
    given = {key: value for key, value in options.items() if value is not None}
    if not words:
        raise InputError("give a job file, or -- and the command to run", field="JOB.yaml")
    if not 1 <= count <= 100_000:
        raise InputError(f"must be between 1 and 100,000, not {count}", field="count")
    if words[0].endswith((".yaml", ".yml", ".json")):
        if len(words) > 1:
            raise InputError(f"{words[1][:60]!r} follows a job file; give one file at a time", field="JOB.yaml")
        if given:
            raise InputError(
                f"{next(iter(given))} cannot be combined with a job file; set it in the file", field="JOB.yaml"
            )
        spec = read_job_file(words[0])
    else:
        spec = job_from_values(given | {"command": words}, Path.cwd())
    with FleetClient(fleet or fleet_folder()) as client:
        ids = client.call("submit", jobs=[spec.to_dict()] * count)["ids"]
    if json_:
        print(json.dumps({"id": ids[0], "ids": ids}))
    else:
        print("\n".join(ids))


def _environment(pairs: list[str] | None) -> dict[str, str] | None:
    if not pairs:
        return None
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise InputError(f"{pair[:60]!r} is not NAME=VALUE", field="env")
        found[name] = value
    return found
