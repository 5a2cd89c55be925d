"""`cotenant ps`: list the tenants of this node's agent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(add_completion=False)


@app.command()
def ps(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    mechanisms: Annotated[
        bool, typer.Option("--mechanisms", help="Show which mechanism enforces what on which GPU.")
    ] = False,
    folder: Annotated[Path | None, typer.Option("--dir", help="Folder of the agent's sockets.")] = None,
) -> None:
    """List tenants: request, limit, actual share, memory, turns and warnings."""
    from cotenant.agent.ipc.client import ControlClient
    from cotenant.core.folders import agent_folder

    with ControlClient(folder or agent_folder()) as client:
        answer = client.call("mechanisms" if mechanisms else "list")
    if as_json:
        print(json.dumps(answer))
    elif mechanisms:
        _print_mechanisms(answer)
    else:
        _print_tenants(answer)


def _print_tenants(answer: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    from cotenant.agent.config.by_hand import value_text
    from cotenant.cli.fitting import print_whole, to_file
    from cotenant.cli.tenant_table import short_line, tenant_table
    from cotenant.core.units import sms_text

    console = Console(soft_wrap=to_file())  # a sentence in a file or pipe stays one line
    if answer["agent"]["config_fault"]:
        console.print(f"[red]configuration: {answer['agent']['config_fault']}[/red]")
    for other in answer["agent"].get("other_agents", ()):
        console.print(f"[red]another agent[/red]: {escape(other['text'])}", highlight=False, soft_wrap=True)
    _print_parked(console, answer)
    index = {gpu["uuid"]: gpu["index"] for gpu in answer["agent"]["gpus"]}
    for row in answer["agent"]["unseen"]:
        if row["tenant"] is None:  # processes of a tenant are listed among the tenant's warnings instead
            how = "without the agent: no limit applies to it"
            if row.get("agent"):
                how = f"as a tenant of another agent ({row['agent']})"
            console.print(
                f"[red]not a tenant[/red]: process {row['pid']} ({row['program']}, user {row['uid']}) uses "
                f"GPU {index[row['gpu']]} {how}",
                highlight=False,
                soft_wrap=True,
            )
    if not answer["tenants"]:
        console.print("no tenants: start one with cotenant run")
        return
    table, left_out = tenant_table(answer, bars=False, width=None if to_file() else console.width)
    print_whole(table, console)
    if left_out:
        console.print(f"left out at {console.width} columns: {', '.join(left_out)}", style="dim", highlight=False)
    for tenant in answer["tenants"]:
        for share in tenant["gpus"]:
            if line := short_line(tenant, share):
                console.print(line, style="red", highlight=False)
            if text := sms_text(share.get("sms")):
                console.print(f"{tenant['name']}: {text} of GPU {share['index']}", style="dim", highlight=False)
        for name, row in tenant["set_by_hand"].items():
            text = f"{value_text(name, row['value'])} was set by hand; the configuration file has"
            text = f"{tenant['name']}: {text} {value_text(name, row['file'], named=False)}"
            console.print(text, style="dim", highlight=False)
        for text in tenant["warnings"]:
            console.print(f"[yellow]{tenant['name']}[/yellow]: {text}", highlight=False)
    host = answer["agent"]["swap_memory"]
    if host["promised_bytes"]:
        whose = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in host["promised_bytes"].items())
        text = (
            f"host memory for swapping: {host['left_bytes'] / 2**30:.1f} of {host['budget_bytes'] / 2**30:.1f} GiB free"
        )
        console.print(f"{text}; promised in GiB: {whose}", style="dim", highlight=False)


def _print_parked(console: Console, answer: dict[str, Any]) -> None:
    """Print parked programs that are not tenants; their name is needed to resume them."""
    for row in answer["parked"]:
        console.print(
            f"parked: {row['name']}, {row['freed_bytes'] / 2**30:.1f} GiB freed; bring it back with "
            f"cotenant resume {row['name']}",
            highlight=False,
        )


def _print_mechanisms(answer: dict[str, Any]) -> None:
    """Print what enforces the shares of each GPU's tenants, then what each mechanism can do."""
    from rich.console import Console

    from cotenant.cli.prospect_view import hanging, print_promises

    console = Console(highlight=False, markup=False)
    for gpu in answer["gpus"]:
        print_promises(console, gpu, gpu["promises"])
    for name, row in answer["mechanisms"].items():
        console.print(f"--mechanism {name}", style="bold")
        by = f"time is enforced by {row['time_by']}, SMs by {row['sms_by']}, memory by {row['memory_by']}"
        texts = (("at least", by), *((key, row[key]) for key in ("compute", "memory", "resize", "isolation")))
        for key, text in (*texts, *(("note", note) for note in row["notes"])):
            hanging(console, f"  {key:<10}", text)
