"""The table of tenants that `cotenant ps` prints and `cotenant top` refreshes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from cotenant.cli.fitting import fit
from cotenant.core.units import format_bytes, format_seconds, sms_text

BAR = 16


def share_bar(got: float | None, request: float, limit: float, sms: dict[str, int] | None = None) -> Text:
    """Return a bar that shows a tenant's actual share of its GPU, `got`. A mark shows the request; the part above the
    limit is shaded. If the share is not measured (`got` is None), return a text instead of a bar: the SMs that the
    tenant may use, if they are known (`sms`).
    """
    if got is None:
        return Text((sms_text(sms) or "not gated").ljust(BAR), style="dim")
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


def short_line(tenant: dict[str, Any], share: dict[str, Any]) -> str:
    """Return a line about a tenant that gets less of a GPU than its request; empty if it gets enough."""
    if not _short(tenant, share):
        return ""
    promised = f"requests {tenant['request']:.0%} of GPU {share['index']}"
    return (
        f"{tenant['name']}: {promised}, got {share['got']:.0%} in the last window, short for "
        f"{format_seconds(share['short_s'])}"
    )


def _short(tenant: dict[str, Any], share: dict[str, Any]) -> bool:
    """Whether a tenant gets less than its request. The agent looks once a second; a share that has reached the request
    since then, as both are shown, is not short.
    """
    got = share["got"]
    return bool(share.get("short_s")) and got is not None and round(got, 2) < round(tenant["request"], 2)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _got(tenant: dict[str, Any], share: dict[str, Any]) -> Text:
    """Return the tenant's actual share as text, highlighted if it is less than the request."""
    text = _percent(share["got"])
    return Text(f"▼ {text}", style="bold red") if _short(tenant, share) else Text(text)


def _state(tenant: dict[str, Any], share: dict[str, Any]) -> Text:
    if share.get("residency", {}).get("moving"):
        return Text("⇄ moves", style="bold cyan")
    if tenant.get("not_enforced"):
        return Text(f"✗ {tenant['state']}", style="bold red")
    if tenant["state"] == "parked":
        return Text("▪ parked", style="cyan")
    if share.get("floor") == "held off":
        return Text("◦ held off", style="yellow")
    if share.get("floor") == "holds":
        return Text("▲ holds off", style="bold green")
    # a tenant under hardware time slices has no turns
    if share["holding"] or (share["got"] and not share["turns"]):
        return Text("▶ runs", style="bold green")
    if share["waiting"]:
        return Text("◦ waits", style="yellow")
    # if the tenant's share is never measured, it is not known whether the tenant is idle
    at_once = share["got"] is None and not share.get("measuring")
    return Text("idle" if tenant["state"] == "running" and not at_once else tenant["state"], style="dim")


def _memory(share: dict[str, Any]) -> Text:
    used, cap = share["memory_used_bytes"], share["memory_limit_bytes"]
    if cap is None:
        return Text(format_bytes(used))
    style = "red" if used > 0.95 * cap else ""
    by = f" by {share['memory_by']}" if share.get("memory_by") in ("kernel", "driver") else ""
    return Text(f"{format_bytes(used)} / {format_bytes(cap)}{by}", style=style)


def _on_gpu(share: dict[str, Any]) -> Text:
    """Return as text how much of the tenant's swappable memory is on the GPU."""
    where = share.get("residency")
    if where is None or not where["movable_bytes"]:
        return Text("all" if where is None else "-", style="dim")
    there = where["resident_bytes"] / where["movable_bytes"]
    return Text(f"{there:.0%}", style="" if there == 1.0 else "cyan")


def _moves(share: dict[str, Any]) -> str:
    where = share.get("residency")
    if where is None:
        return "-"
    return f"{where['moves_out'] + where['moves_in']:,}, {format_seconds(where['moving_s'])}"


BAR_HEAD = "OF THE WINDOW"
MOVE_HEADS = ("ON GPU", "MOVES")
CLASS_HEAD = "CLASS"
CLASSES = {"latency-sensitive": "LS", "best-effort": "BE"}
HEADS = (
    "GPU",
    CLASS_HEAD,
    "STATE",
    "ASKED",
    "LIMIT",
    "GOT",
    BAR_HEAD,
    "MEMORY",
    *MOVE_HEADS,
    "TURNS",
    "WAITED",
    "LAUNCHES",
    "PIDS",
)
DISPENSABLE = (
    *("LAUNCHES", "PIDS", "TURNS", BAR_HEAD, "LIMIT", "WAITED", "MOVES", "GPU", "MEMORY", "ON GPU", "ASKED"),
    *(CLASS_HEAD, "STATE"),
)


def tenant_table(
    answer: dict[str, Any], *, bars: bool = True, sort: str = "", width: int | None = None
) -> tuple[Table, list[str]]:
    """Returns a table with one row per tenant and GPU, and the columns left out for lack of `width` (None: unlimited).
    `sort`: a key of SORTS; by default, tenants are in order of arrival. Tenants' names are never shortened, since
    commands take them.
    """
    rows = [(tenant, share) for tenant in answer["tenants"] for share in tenant["gpus"]]
    if sort:
        rows.sort(key=SORTS[sort], reverse=sort != "name")

    def build(heads: Sequence[str]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("TENANT", overflow="fold")
        for head in heads:
            left = head in ("STATE", BAR_HEAD)
            table.add_column(head, justify="left" if left else "right", no_wrap=True)
        for tenant, share in rows:
            name = Text(tenant["name"])
            if tenant["warnings"]:
                name.append(" ⚠", style="yellow")
            cells = _cells(tenant, share)
            table.add_row(name, *(cells[head] for head in heads))
        return table

    moving = any("residency" in share for _, share in rows)
    classes = any(tenant.get("class") in CLASSES for tenant, _ in rows)
    absent = {*(() if bars else (BAR_HEAD,)), *(() if moving else MOVE_HEADS), *(() if classes else (CLASS_HEAD,))}
    heads = [head for head in HEADS if head not in absent]
    if width is None:
        return build(heads), []
    return fit(build, heads, DISPENSABLE, width)


def _bar(tenant: dict[str, Any], share: dict[str, Any]) -> Text:
    if share.get("measuring"):
        return Text("not a window yet".ljust(BAR), style="dim")
    return share_bar(share["got"], tenant["request"], tenant["limit"], share.get("sms"))


def _cells(tenant: dict[str, Any], share: dict[str, Any]) -> dict[str, Text | str]:
    pids = tenant["pids"]
    return {
        "GPU": str(share["index"]),
        CLASS_HEAD: CLASSES.get(str(tenant.get("class")), "-"),
        "STATE": _state(tenant, share),
        "ASKED": _percent(tenant["request"]),
        "LIMIT": _percent(tenant["limit"]),
        "GOT": _got(tenant, share),
        BAR_HEAD: _bar(tenant, share),
        "MEMORY": _memory(share),
        "ON GPU": _on_gpu(share),
        "MOVES": _moves(share),
        "TURNS": f"{share['turns']:,}",
        "WAITED": format_seconds(share["waited_s"] or tenant["gate_wait_s"]),
        "LAUNCHES": f"{tenant['launches'] + tenant['graph_launches']:,}",
        "PIDS": str(pids[0]) if len(pids) == 1 else f"{len(pids)} procs" if pids else "-",
    }


SORTS = {
    "name": lambda row: row[0]["name"],
    "got": lambda row: row[1]["got"] or 0.0,
    "memory": lambda row: row[1]["memory_used_bytes"],
    "waited": lambda row: row[1]["waited_s"],
}
