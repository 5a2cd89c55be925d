"""Prints the tables of `cotenant queue` and `cotenant fleet status`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from cotenant.cli.fitting import print_whole
from cotenant.core.units import counted, format_memory, format_seconds

MOST_ROWS = 200


def print_status(answer: dict[str, Any]) -> None:
    """Print the fleet's state in a few lines, and a table of its nodes."""
    console = Console(highlight=False)
    jobs = answer["jobs"]
    console.print(
        f"{answer['policy']['label']} in rounds of {format_seconds(answer['lease_s'])}, executor "
        f"{answer['executor']}, up for {format_seconds(answer['time_s'])}"
    )
    over = ", ".join(f"{jobs[state]:,} {state}" for state in ("finished", "failed", "cancelled") if jobs[state])
    console.print(f"{counted(jobs['running'], 'job')} running, {jobs['queued']:,} waiting{f'; {over}' if over else ''}")
    for fault in answer["faults"]:
        console.print(f"fault: {fault}", style="bold red")
    table = Table(box=None, header_style="bold")
    for head in ("NODE", "GPUS", "HELD", "MODEL", "CPUS", "MEMORY", "JOBS"):
        table.add_column(head, justify="left" if head in ("NODE", "MODEL") else "right")
    for node in answer["nodes"]:
        name = node["name"] if node["reachable"] else f"{node['name']} (does not answer)"
        table.add_row(
            name, str(node["gpus"]), f"{node['gpus_held']:g}", node["gpu_model"] or "-", f"{node['cpus']:g}",
            format_memory(node["memory_bytes"]), str(node["jobs"]), style=None if node["reachable"] else "red",
        )  # fmt: skip
    print_whole(table, console)


def print_queue(jobs: list[dict[str, Any]], everything: bool) -> None:
    """Print one line per job of the fleet. `everything`: ended jobs, too."""
    console = Console(highlight=False)
    if not jobs:
        console.print("no jobs" if everything else "no jobs run or wait; --all also lists those that have ended")
        return
    table = Table(box=None, header_style="bold")
    for head in ("ID", "STATE", "GPUS", "CPUS", "DONE", "RAN", "WAITED", "TRIES", "WHERE OR WHY"):
        table.add_column(head, justify="left" if head in ("ID", "STATE", "WHERE OR WHY") else "right",
                         no_wrap=head == "ID")  # fmt: skip
    for job in jobs[:MOST_ROWS]:
        table.add_row(
            job["id"], job["state"], job["slice"] or f"{job['gpus']:g}",
            "-" if job["cpus"] is None else f"{job['cpus']:g}", "-" if job["done"] is None else f"{job['done']:.0%}",
            format_seconds(job["ran_s"]), format_seconds(job["waited_s"]), str(job["attempts"]), _where(job),
            style=_style(job["state"]),
        )  # fmt: skip
    print_whole(table, console)
    if len(jobs) > MOST_ROWS:
        console.print(f"and {len(jobs) - MOST_ROWS:,} more; --json lists all")


def _where(job: dict[str, Any]) -> str:
    if job["nodes"]:
        return ", ".join(f"{place['node']} ({place['gpus']:g})" for place in job["nodes"])
    return str(job["error"] or job["why"])


def _style(state: str) -> str | None:
    return {"failed": "red", "running": "green", "cancelled": "dim"}.get(state)
