"""The table of tenants that ps prints and top refreshes."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from cotenant.model.units import format_bytes, format_seconds

BAR = 16


def share_bar(got: float | None, request: float, limit: float) -> Text:
    """What a tenant got, as a bar of its GPU; the mark is its request, the shaded end what its limit closes."""
    if got is None:
        return Text("not gated".ljust(BAR), style="dim")
    filled = round(got * BAR)
    mark = round(request * BAR) - 1 if request > 0 else -1
    closed = round(limit * BAR)
    text = Text()
    for cell in range(BAR):
        if cell == mark:
            text.append("┃", style="bold white")
        elif cell < filled:
            text.append("█", style="green" if got >= request - 0.02 else "yellow")
        elif cell >= closed:
            text.append("░", style="dim red")
        else:
            text.append("·", style="dim")
    return text


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _state(tenant: dict[str, Any], share: dict[str, Any]) -> Text:
    if share["holding"]:
        return Text("▶ runs", style="bold green")
    if share["waiting"]:
        return Text("◦ waits", style="yellow")
    return Text(tenant["state"] if tenant["state"] != "running" else "idle", style="dim")


def _memory(share: dict[str, Any]) -> Text:
    used, cap = share["memory_used_bytes"], share["memory_limit_bytes"]
    if cap is None:
        return Text(format_bytes(used))
    style = "red" if used > 0.95 * cap else ""
    return Text(f"{format_bytes(used)} / {format_bytes(cap)}", style=style)


def tenant_table(answer: dict[str, Any], *, bars: bool = True, sort: str = "") -> Table:
    """One row per tenant and GPU. `sort`: a key of SORTS, or the order of arrival."""
    table = Table(box=None, pad_edge=False, header_style="bold", expand=bars)
    table.add_column("TENANT", no_wrap=True, overflow="ellipsis", ratio=2 if bars else None)
    table.add_column("GPU", justify="right")
    table.add_column("STATE", no_wrap=True)
    for head in ("ASKED", "LIMIT", "GOT"):
        table.add_column(head, justify="right")
    if bars:
        table.add_column("OF THE WINDOW", no_wrap=True, width=BAR)
    for head in ("MEMORY", "TURNS", "WAITED", "LAUNCHES", "PIDS"):
        table.add_column(head, justify="right", no_wrap=True)
    rows = [(tenant, share) for tenant in answer["tenants"] for share in tenant["gpus"]]
    if sort:
        rows.sort(key=SORTS[sort], reverse=sort != "name")
    for tenant, share in rows:
        name = Text(tenant["name"])
        if tenant["warnings"]:
            name.append(" ⚠", style="yellow")
        cells: list[Text | str] = [
            name,
            str(share["index"]),
            _state(tenant, share),
            _percent(tenant["request"]),
            _percent(tenant["limit"]),
            _percent(share["got"]),
        ]
        if bars:
            cells.append(share_bar(share["got"], tenant["request"], tenant["limit"]))
        waited_s = share["waited_s"] or tenant["gate_wait_s"]
        pids = tenant["pids"]
        cells += [
            _memory(share),
            f"{share['turns']:,}",
            format_seconds(waited_s),
            f"{tenant['launches'] + tenant['graph_launches']:,}",
            str(pids[0]) if len(pids) == 1 else f"{len(pids)} procs" if pids else "-",
        ]
        table.add_row(*cells)
    return table


SORTS = {
    "name": lambda row: row[0]["name"],
    "got": lambda row: row[1]["got"] or 0.0,
    "memory": lambda row: row[1]["memory_used_bytes"],
    "waited": lambda row: row[1]["waited_s"],
}
