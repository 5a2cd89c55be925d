"""`cotenant top`: live table of tenants."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.agent.ipc.client import ControlClient
from cotenant.cli.fitting import FILE_WIDTH, flowing, to_file
from cotenant.cli.shared_options import TokenFile, shown_token
from cotenant.core.errors import InputError, WorkError
from cotenant.core.units import counted, format_bytes, format_seconds, parse_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

app = typer.Typer(add_completion=False)

KEYS = {"n": "name", "g": "got", "m": "memory", "w": "waited", "a": ""}


@app.command()
def top(
    every: Annotated[str, typer.Option(metavar="TIME", help="Refresh interval.")] = "1s",
    once: Annotated[bool, typer.Option("--once", help="Print one table and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and exit.")] = False,
    folder: Annotated[Path | None, typer.Option("--dir", help="Folder of the agent's sockets.")] = None,
    url: Annotated[str, typer.Option(help="Show the server (cotenant serve) at this URL instead of tenants.")] = "",
    token: TokenFile = None,
) -> None:
    """Show tenants live: requested and actual share, memory, turns, waiting time. Keys: q quits; the others sort: n by
    name, g by actual share, m by memory, w by waiting time, a by arrival.
    """
    from cotenant.core.folders import agent_folder

    period_s = parse_seconds(every, "--every")
    if period_s < 0.05:
        raise InputError("the refresh interval must be at least 50 ms", field="--every")
    if url:
        from cotenant.cli.top_server import show

        show(url, shown_token(token), period_s, once, as_json)
        return
    with ControlClient(folder or agent_folder()) as client:
        answer = client.call("list")
    if as_json:
        print(json.dumps(answer))
        return
    from rich.console import Console

    if once or not sys.stdout.isatty():
        width = FILE_WIDTH if to_file() else None
        console = Console(width=width)
        console.print(screen(answer, sort="", key_line=False, width=console.width))
        return
    _live(folder or agent_folder(), period_s)


def screen(
    answer: dict[str, Any], *, sort: str, key_line: bool = True, lost: str = "", width: int | None = None
) -> RenderableType:
    """Draw the whole screen: one line per GPU, then tenants, shortfalls and warnings. Columns of tenants that do not
    fit into `width` are left out and named.
    """
    from rich.console import Group
    from rich.text import Text

    from cotenant.cli.tenant_table import CLASSES, short_line, tenant_table

    agent = answer["agent"]
    classes = any(tenant.get("class") in CLASSES for tenant in answer["tenants"])
    colocation = f"  co-location {agent['colocation']}" if classes else ""
    head = (
        Text("cotenant top", style="bold"),
        Text(
            f"agent {agent['pid']}, up {format_seconds(agent['uptime_s'])},"
            f" {counted(len(answer['tenants']), 'tenant')},"
            f" {counted(agent['connections'], 'process', 'processes')}, {counted(agent['turns'], 'turn')}"
        ),
        Text(f"{agent['discipline']}, turns {agent['quota_ms']:g} ms, window {agent['window_s']:g} s{colocation}"),
    )
    parts: list[RenderableType] = [flowing(head, width)]
    for gpu in agent["gpus"]:
        used, total = gpu["memory_charged_bytes"], gpu["memory_bytes"]
        turn = Text.assemble("turn of ", (gpu["holder"], "green")) if gpu["holder"] else Text("no turn", style="dim")
        line = (
            Text.assemble((f"GPU {gpu['index']} ", "bold"), gpu["name"]),
            Text(f"promised {gpu['promised']:.0%}"),
            Text(f"memory {format_bytes(used)} / {format_bytes(total)}"),
            turn,
        )
        parts.append(flowing(line, width))
    table, left_out = tenant_table(answer, sort=sort, width=width)
    parts += [Text(), table]
    if left_out:
        parts.append(Text(f"left out at {width} columns: {', '.join(left_out)}", style="dim"))
    if not answer["tenants"]:
        parts.append(Text("no tenants: start one with cotenant run", style="dim"))
    short = list(filter(None, (short_line(t, share) for t in answer["tenants"] for share in t["gpus"])))
    if short:
        parts += [Text(), *(Text(f"▼ {text}", style="bold red") for text in short)]
    warnings = [(t["name"], text) for t in answer["tenants"] for text in t["warnings"]]
    if agent["config_fault"]:
        warnings.insert(0, ("configuration", agent["config_fault"]))
    warnings += [("another agent", other["text"]) for other in agent.get("other_agents", ())]
    if warnings:
        parts.append(Text())
    for name, text in warnings[-5:]:
        parts.append(Text.assemble((f"⚠ {name}: ", "yellow"), text))
    if lost:
        parts.append(Text(lost, style="bold red"))
    if key_line:
        parts += [Text(), Text("q quit   sort: n name  g got  m memory  w waited  a arrival", style="dim")]
    return Group(*parts)


def _live(folder: Path, period_s: float) -> None:
    import termios
    import tty

    from rich.live import Live

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal) if os.isatty(terminal) else None
    client: ControlClient | None = None
    answer: dict[str, Any] | None = None
    sort, lost = "", ""
    try:
        if before is not None:
            tty.setcbreak(terminal)
        with Live(screen=True, auto_refresh=False) as live:
            while True:
                try:
                    client = client or ControlClient(folder)
                    answer, lost = client.call("list"), ""
                except WorkError as error:
                    client, lost = None, str(error)
                if answer is not None:
                    live.update(screen(answer, sort=sort, lost=lost, width=live.console.width), refresh=True)
                if before is None:
                    time.sleep(period_s)
                    continue
                key = _key(terminal, period_s)
                if key == "q":
                    return
                sort = KEYS.get(key or "", sort)
    except KeyboardInterrupt:  # Ctrl-C is a way to leave, like q
        return
    finally:
        if before is not None:
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        if client is not None:
            client.close()


def _key(terminal: int, wait_s: float) -> str | None:
    ready, _, _ = select.select([terminal], [], [], wait_s)
    return os.read(terminal, 1).decode(errors="replace") if ready else None
