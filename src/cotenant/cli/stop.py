"""`cotenant stop`: end a tenant's processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def stop(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tenant.")],
    grace: Annotated[str, typer.Option(metavar="TIME", help="Time between SIGTERM and SIGKILL.")] = "10s",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    folder: Annotated[Path | None, typer.Option("--dir", help="Folder of the agent's sockets.")] = None,
) -> None:
    """Stop a tenant: SIGTERM to its program and processes, SIGKILL to those still alive after the grace time."""
    from cotenant.agent.ipc.client import ControlClient
    from cotenant.core.errors import WorkError
    from cotenant.core.folders import agent_folder
    from cotenant.core.units import counted, parse_seconds

    grace_s = parse_seconds(grace, "--grace")
    with ControlClient(folder or agent_folder(), timeout_s=grace_s + 30) as client:
        answer = client.call("stop", name=name, grace_s=grace_s)
    if as_json:
        print(json.dumps(answer))
    else:
        print(f"{name}: {counted(answer['stopped'], 'process', 'processes')} stopped")
    if answer["left"]:
        raise WorkError(f"still running: {', '.join(map(str, answer['left']))}")
    if answer["held"]:
        raise WorkError(f"{name} still exists: {answer['held']}")
