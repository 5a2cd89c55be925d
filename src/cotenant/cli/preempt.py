"""`cotenant preempt`: a GPU freed for a scheduler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def preempt(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="Whom, or as many as needed.")] = None,
    gpu: Annotated[str | None, typer.Option(metavar="UUID", help="On which GPU, without names.")] = None,
    free: Annotated[str | None, typer.Option(metavar="40GiB", help="How much is needed; else everything.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    folder: Annotated[Path | None, typer.Option("--dir", help="Folder of the agent's sockets.")] = None,
) -> None:
    """Park tenants until a GPU has room: lowest priority first, those that move their own memory before the others.
    They come back with `cotenant resume`. Exit code 1 when there is not enough."""
    from cotenant.agent.ipc.client import ControlClient
    from cotenant.core.errors import WorkError
    from cotenant.core.folders import agent_folder
    from cotenant.core.units import format_bytes, parse_bytes

    free_bytes = parse_bytes(free, "--free") if free else None
    with ControlClient(folder or agent_folder(), timeout_s=7200) as client:
        answer = client.call("preempt", names=names or [], gpu=gpu, free_bytes=free_bytes)
    if as_json:
        print(json.dumps(answer))
    else:
        for parked in answer["parked"]:
            print(f"{parked['name']}: parked, {format_bytes(parked['freed_bytes'])} freed")
        print(f"{format_bytes(answer['freed_bytes'])} freed in {answer['seconds']:.2f} s")
    if not answer["enough"]:
        why = "; ".join(f"{name}: {text}" for name, text in answer["failed"].items())
        raise WorkError(f"not enough could be freed{': ' + why if why else ''}")
