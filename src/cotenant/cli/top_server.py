"""`cotenant top --url`: live table of a server's services and gpulets."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from cotenant.cli.fitting import FILE_WIDTH, fit, flowing, to_file
from cotenant.core.errors import InputError, WorkError
from cotenant.core.units import counted, format_ms, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.table import Table


def show(url: str, token: str | None, period_s: float, once: bool, as_json: bool) -> None:
    """Print one table of a server's services and gpulets, or refresh it until Ctrl-C."""
    base, headers = _address(url, token)
    status = _ask(base, headers)
    if as_json:
        print(json.dumps(status))
        return
    from rich.console import Console

    if once or not sys.stdout.isatty():
        console = Console(width=FILE_WIDTH if to_file() else None)
        console.print(screen(status, base, width=console.width))
        return
    from rich.live import Live

    before: dict[str, Any] | None = None
    lost = ""
    # Ctrl-C is the way to leave
    with contextlib.suppress(KeyboardInterrupt), Live(screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen(status, base, before, lost, live.console.width), refresh=True)
            time.sleep(period_s)
            try:
                before, status, lost = status, _ask(base, headers), ""
            except WorkError as error:
                lost = str(error)


def _address(url: str, token: str | None) -> tuple[str, dict[str, str]]:
    base = (url if "//" in url else f"http://{url}").rstrip("/")
    if not base.startswith(("http://", "https://")):
        raise InputError(f"{url!r} is not the address of a server, such as http://127.0.0.1:8000", field="--url")
    return base, {} if token is None else {"authorization": f"Bearer {token}"}


def _ask(base: str, headers: dict[str, str]) -> dict[str, Any]:
    import http.client
    import urllib.error
    import urllib.request

    request = urllib.request.Request(base + "/cotenant/status", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as got:
            found: dict[str, Any] = json.loads(got.read())
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise WorkError(f"{base} requires a token: give --token FILE with a valid one") from None
        if error.code == 404:
            raise WorkError(
                f"{base} is no server of cotenant serve (it answered 404); cotenant top without --url shows an agent"
            ) from None
        raise WorkError(f"{base} answered {error.code}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise WorkError(f"cannot connect to {base}: {getattr(reason, 'strerror', None) or reason}") from None
    return found


def screen(
    status: dict[str, Any], base: str, before: dict[str, Any] | None = None, lost: str = "", width: int | None = None
) -> RenderableType:
    """Draw the whole screen. Rates are computed between the previous status and this one. Columns that do not fit into
    `width` are left out and named.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if "models" in status:
        from cotenant.cli.top_models import screen as models_screen

        return models_screen(status, base, lost)
    head = (
        Text("cotenant top", style="bold"),
        Text(f"{base}, up {format_seconds(status['uptime_s'])}"),
        Text(f"{status['gpus_in_use']} of {counted(status['gpus'], 'GPU')} in use, {status['gpus_held']} reserved"),
        Text(f"{counted(status['in_flight'], 'request')} in flight"),
        Text(f"{counted(status['replans'], 'plan')} made, {status['switches']:,} put into effect"),
    )
    services, left_out = _services(status, width)
    gpulets = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("GPU", "partition", "services (batch)", "busy", "duty ms", "state", "pid"):
        gpulets.add_column(name, justify="left" if name in ("services (batch)", "state") else "right")
    busy_before = {x["name"]: x["busy"] * before["uptime_s"] for x in before["gpulets"]} if before else {}
    span = status["uptime_s"] - before["uptime_s"] if before else status["uptime_s"]
    for let in status["gpulets"]:
        busy = (let["busy"] * status["uptime_s"] - busy_before.get(let["name"], 0.0)) / max(1e-3, span)
        gpulets.add_row(
            str(let["gpu"]), let["partition"], ", ".join(f"{s['service']} ({s['batch']})" for s in let["seats"]),
            f"{min(1.0, max(0.0, busy)):.0%}", f"{let['duty_ms']:.1f}", let["state"], str(let["pid"] or "-"),
        )  # fmt: skip
    parts: list[RenderableType] = [flowing(head, width), Text(), services]
    if left_out:
        parts.append(Text(f"left out at {width} columns: {', '.join(left_out)}", style="dim"))
    parts += [Text(), gpulets]
    faults = [f"{row['name']}: {row['not_ready']}" for row in status["services"] if row["not_ready"]]
    if status["note"]:
        faults.insert(0, status["note"])
    if faults:
        parts += [Text(), *(Text(f"⚠ {text}", style="yellow") for text in faults[:6])]
    if lost:
        parts.append(Text(lost, style="bold red"))
    return Group(*parts)


def _services(status: dict[str, Any], width: int | None) -> tuple[Table, list[str]]:
    """Return the table of services, at most `width` characters wide, and the heads of the columns that are left out."""
    from rich.table import Table
    from rich.text import Text

    heads = (
        "service", "asked/s", "capacity/s", "p50 ms", "p99 ms", "SLO ms", "in time", "dropped", "failed", "queue",
    )  # fmt: skip
    rows: list[dict[str, RenderableType]] = []
    for row in status["services"]:
        outcomes = row["outcomes"]
        ended = sum(outcomes.values())
        share = f"{outcomes['ok'] / ended:.2%}" if ended else "-"
        late = row["p99_ms"] is not None and row["p99_ms"] > row["slo_ms"]
        cells: tuple[RenderableType, ...] = (
            Text(row["name"], style="red" if row["not_ready"] else ""), _figure(row["rate_rps"]),
            _figure(row["capacity_rps"]), _figure(row["p50_ms"]),
            Text(_figure(row["p99_ms"]), style="red" if late else ""), format_ms(row["slo_ms"]), share,
            f"{outcomes['dropped'] + outcomes['full']:,}", f"{outcomes['failed']:,}", f"{row['waiting']:,}",
        )  # fmt: skip
        rows.append(dict(zip(heads, cells, strict=True)))

    def services_table(shown: Sequence[str]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in shown:
            table.add_column(name, justify="left" if name == "service" else "right", no_wrap=True)
        for cells in rows:
            table.add_row(*(cells[name] for name in shown))
        return table

    dispensable = ("failed", "queue", "p50 ms", "dropped", "capacity/s") if width is not None else ()
    return fit(services_table, heads, dispensable, width or 0)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
