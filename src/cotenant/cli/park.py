"""`cotenant park`: move a tenant, or any running CUDA program, off its GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def park(
    name: Annotated[
        str, typer.Argument(metavar="NAME|pid:N", help="A tenant's name, or pid:N for any running CUDA program.")
    ],
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="Fail if the program's GPU work does not finish within this time.")
    ] = "10s",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    folder: Annotated[Path | None, typer.Option("--dir", help="Folder of the agent's sockets.")] = None,
) -> None:
    """Free the GPU memory of a running program, which `cotenant resume` restores. The program does not notice."""
    from cotenant.agent.ipc.client import ControlClient
    from cotenant.core.folders import agent_folder
    from cotenant.core.units import format_bytes, parse_seconds

    timeout_s = parse_seconds(timeout, "--timeout")
    with ControlClient(folder or agent_folder(), timeout_s=3600) as client:
        answer = client.call("park", name=name, timeout_s=timeout_s)
    if as_json:
        print(json.dumps(answer))
        return
    how = "the driver's checkpoint"
    if answer["method"] == "swap":
        how = "copies to host memory (the program's CUDA context stays on the GPU)"
    print(f"{name}: parked in {answer['seconds']:.2f} s, {format_bytes(answer['freed_bytes'])} freed by {how}")
