"""`cotenant resume`: bring a parked program back to a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def resume(
    name: Annotated[str, typer.Argument(metavar="NAME|pid:N", help="The name that was given to `cotenant park`.")],
    gpu: Annotated[str | None, typer.Option(metavar="UUID", help="Another GPU of the same kind.")] = None,
    instead_of: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A program that is parked at the same time; repeatable.")
    ] = None,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="How long to wait for free memory on the GPU.")] = "60s",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    folder: Annotated[Path | None, typer.Option("--dir", help="Folder of the agent's sockets.")] = None,
) -> None:
    """Bring a parked program back to its GPU. If the GPU has not enough free memory, the program stays parked and loses
    nothing."""
    from cotenant.agent.ipc.client import ControlClient
    from cotenant.core.folders import agent_folder
    from cotenant.core.units import format_bytes, parse_seconds

    timeout_s = parse_seconds(timeout, "--timeout")
    with ControlClient(folder or agent_folder(), timeout_s=timeout_s + 3600) as client:
        answer = client.call("resume", name=name, gpu=gpu, timeout_s=timeout_s, instead_of=instead_of or [])
    if as_json:
        print(json.dumps(answer))
        return
    where = f" on {', '.join(answer['gpus'])}" if answer["gpus"] else ""
    print(f"{name}: back{where} after {answer['seconds']:.2f} s")
    for row in answer.get("parked", []):
        print(f"{row['name']}: parked, {format_bytes(row['freed_bytes'])} freed in {row['seconds']:.2f} s")
    for other, why in answer.get("failed", {}).items():
        print(f"{other}: not parked: {why}")
