"""`cotenant ps`: the tenants of this node's agent."""

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
    mechanisms: Annotated[bool, typer.Option("--mechanisms", help="What enforces what, by GPU and mechanism.")] = False,
    folder: Annotated[Path | None, typer.Option("--dir", help="Folder of the agent's sockets.")] = None,
) -> None:
    """List tenants: what each asked for, what it got, its memory, turns and warnings."""
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

    from cotenant.cli.fitting import FILE_WIDTH, table_width, to_file
    from cotenant.cli.tenant_table import tenant_table

    console = Console()
    if answer["agent"]["config_fault"]:
        console.print(f"[red]the configuration file is not taken: {answer['agent']['config_fault']}[/red]")
    _print_parked(console, answer)
    index = {gpu["uuid"]: gpu["index"] for gpu in answer["agent"]["gpus"]}
    for row in answer["agent"]["unseen"]:
        if row["tenant"] is None:  # a tenant's are among its warnings
            console.print(
                f"[red]unseen[/red]: process {row['pid']} ({row['program']}, user {row['uid']}) of no tenant uses GPU"
                f" {index[row['gpu']]} past the agent: no limit holds for it",
                highlight=False,
                soft_wrap=True,
            )
    if not answer["tenants"]:
        console.print("no tenants: start one with cotenant run")
        return
    table, left_out = tenant_table(answer, bars=False, width=None if to_file() else console.width)
    if to_file():
        console = Console(width=max(FILE_WIDTH, table_width(table)))
    console.print(table)
    if left_out:
        console.print(f"left out at {console.width} columns: {', '.join(left_out)}", style="dim", highlight=False)
    for tenant in answer["tenants"]:
        for share in tenant["gpus"]:
            if line := short_line(tenant, share):
                console.print(line, style="red", highlight=False)
            sms = share.get("sms")
            if sms and sms["reserved"]:
                text = f"{sms['reserved']} SMs of GPU {share['index']} are its own, it sees at most {sms['at_most']}"
                console.print(f"{tenant['name']}: {text}", style="dim", highlight=False)
        for text in tenant["warnings"]:
            console.print(f"[yellow]{tenant['name']}[/yellow]: {text}", highlight=False)
    host = answer["agent"]["swap_memory"]
    if host["promised_bytes"]:
        whose = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in host["promised_bytes"].items())
        text = (
            f"host memory to move to: {host['left_bytes'] / 2**30:.1f} of {host['budget_bytes'] / 2**30:.1f} GiB left"
        )
        console.print(f"{text}; promised in GiB: {whose}", style="dim", highlight=False)


def short_line(tenant: dict[str, Any], share: dict[str, Any]) -> str:
    """Of a tenant that gets less of a GPU than it was promised; else nothing."""
    from cotenant.core.units import format_seconds

    if not share["short_s"] or share["got"] is None:
        return ""
    promised = f"promised {tenant['request']:.0%} of GPU {share['index']} while it wants it"
    return f"{tenant['name']}: {promised}, got {share['got']:.0%} of late, short for {format_seconds(share['short_s'])}"


def _print_parked(console: Console, answer: dict[str, Any]) -> None:
    """Programs that are no tenants, and would not be found again without their number."""
    for row in answer["parked"]:
        console.print(
            f"parked: {row['name']}, {row['freed_bytes'] / 2**30:.1f} GiB given back; bring it back with"
            f" cotenant resume {row['name']}",
            highlight=False,
        )


def _print_mechanisms(answer: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    for gpu in answer["gpus"]:
        console.print(f"[bold]{gpu['uuid']}[/bold]", highlight=False)
        for row in gpu["promises"]:
            console.print(f"  {row['promise']}: by {row['by']} ({row['mechanism']})", highlight=False)
    for name, row in answer["mechanisms"].items():
        console.print(f"[bold]{name}[/bold]")
        by = f"time by {row['time_by']}, SMs by {row['sms_by']}, memory by {row['memory_by']}"
        console.print(f"  enforced: {by}", highlight=False)
        for key in ("compute", "memory", "resize", "isolation"):
            console.print(f"  {key}: {row[key]}", highlight=False)
        for note in row["notes"]:
            console.print(f"  note: {note}", highlight=False)
