"""`cotenant set`: change a tenant's share while it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False)

Text = str | None


@app.command("set")
def set_share(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tenant.")],
    request: Annotated[
        Text, typer.Option(metavar="30%", help="GPU time that the tenant gets when others compete.")
    ] = None,
    limit: Annotated[Text, typer.Option(metavar="60%", help="GPU time that the tenant never exceeds.")] = None,
    memory: Annotated[Text, typer.Option(metavar="8GiB", help="Limit on the tenant's GPU memory.")] = None,
    priority: Annotated[
        int | None, typer.Option(help="For discipline priority: a tenant with a larger value goes first.")
    ] = None,
    weight: Annotated[
        float | None, typer.Option(help="Weight, for discipline weighted-round-robin, or under mps from driver 620 on.")
    ] = None,
    copy_weight: Annotated[float | None, typer.Option(help="Weight on the PCIe link.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    folder: Annotated[Path | None, typer.Option("--dir", help="Folder of the agent's sockets.")] = None,
) -> None:
    """Change a tenant's share, memory limit or weights, and print when the change takes effect."""
    from cotenant.agent.ipc.client import ControlClient
    from cotenant.core.errors import InputError
    from cotenant.core.folders import agent_folder
    from cotenant.core.units import format_bytes, parse_fraction, parse_memory

    changes: dict[str, Any] = {
        "request": parse_fraction(request, "--request") if request else None,
        "limit": parse_fraction(limit, "--limit") if limit else None,
        "memory_bytes": parse_memory(memory, "--memory") if memory else None,
        "priority": priority,
        "weight": weight,
        "copy_weight": copy_weight,
    }
    if all(value is None for value in changes.values()):
        options = (f"--{key.removesuffix('_bytes').replace('_', '-')}" for key in changes)
        raise InputError(f"nothing to change: give one of {', '.join(options)}")
    with ControlClient(folder or agent_folder()) as client:
        answer = client.call("set", name=name, **changes)
    if as_json:
        print(json.dumps(answer))
        return
    memory_bytes = answer["memory_bytes"]
    memory_text = "no memory limit" if memory_bytes is None else f"memory {format_bytes(memory_bytes)}"
    also = (("priority", priority), ("weight", weight), ("copy weight", copy_weight))
    more = "".join(f", {words} {answer[words.replace(' ', '_')]:g}" for words, given in also if given is not None)
    changed = [key for key, value in changes.items() if value is not None]
    kept = any(key in answer["set_by_hand"] for key in changed)
    until = "; kept until the value in the agent's configuration file changes" if kept else ""
    print(
        f"{name}: request {answer['request']:.0%}, limit {answer['limit']:.0%}, {memory_text}{more};"
        f" holds {answer['holds']}{until}"
    )
