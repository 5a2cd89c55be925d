"""`cotenant preempt`: park tenants to free GPU memory for a scheduler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def preempt(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="Tenants to park; without names, as many as needed.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(metavar="UUID", help="GPU to free, if no names are given.")] = None,
    free: Annotated[str | None, typer.Option(metavar="40GiB", help="GPU memory to free (default: all).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    folder: Annotated[Path | None, typer.Option("--dir", help="Folder of the agent's sockets.")] = None,
) -> None:
    """Park tenants until enough GPU memory is free: lowest priority first; of equal priority, first those started with
    `--oversubscribe swap`. `cotenant resume` brings them back. Exits with 1 if too little could be freed.
    """
    from cotenant.agent.ipc.client import ControlClient
    from cotenant.core.errors import WorkError
    from cotenant.core.folders import agent_folder
    from cotenant.core.units import format_bytes, parse_memory

    free_bytes = parse_memory(free, "--free") if free is not None else None
    with ControlClient(folder or agent_folder(), timeout_s=7200) as client:
        answer = client.call("preempt", names=names or [], gpu=gpu, free_bytes=free_bytes)
    if as_json:
        print(json.dumps(answer))
    else:
        for parked in answer["parked"]:
            print(f"{parked['name']}: parked, {format_bytes(parked['freed_bytes'])} freed")
        print(f"{format_bytes(answer['freed_bytes'])} freed in {answer['seconds']:.2f} s")
    if not answer["enough"]:
        whys = [f"{name}: {text}" for name, text in answer["failed"].items()]
        if free_bytes is not None:
            whys.insert(0, f"{format_bytes(answer['freed_bytes'])} of {format_bytes(free_bytes)}")
        raise WorkError("; ".join(["not enough memory could be freed", *whys]).replace("; ", ": ", 1))
