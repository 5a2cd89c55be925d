"""`cotenant top --url` for a server of language models: a live table of the models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

STYLES = {"resident": "green", "cold": "dim", "evicted": "dim"}
COLUMNS = ("TTFT ms", "SLO", "in time", "TPOT ms", "SLO", "whole ms", "failed", "switches", "took")
OF_STREAMS = (
    "TTFT (p50 / p99) and TPOT (p50) are of streamed answers only; in time: TTFT within its SLO, failed requests are "
    "late; whole (p50 / p99): time to the answer where it is not streamed; failed: refused or not answered."
)


def screen(status: dict[str, Any], base: str, lost: str = "") -> RenderableType:
    """Draw the whole screen of a server of language models: one line per model. Models that never had a request are
    only counted.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from cotenant.core.units import format_bytes, format_ms, format_seconds

    used = ", ".join(
        f"GPU {gpu['index']} {format_bytes(gpu['used_bytes'])} / {format_bytes(gpu['memory_bytes'])}"
        for gpu in status["gpus"]
    )
    up = format_seconds(status["uptime_s"])
    head = Text.assemble(
        ("cotenant top", "bold"), f"   {base}, up {up}   {status['in_flight']:,} requests in flight   {used}"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("model", "state", "GPU", "memory", "queue", "open", *COLUMNS):
        table.add_column(name, justify="left" if name in ("model", "state") else "right")
    for row in status["models"]:
        late = row["ttft_p99_ms"] is not None and row["ttft_p99_ms"] > row["ttft_slo_ms"]
        table.add_row(
            Text(row["name"], style="red" if row["fault"] else ""),
            Text(row["state"], style=STYLES.get(row["state"], "yellow")),
            *(("-", "-") if row["gpu"] is None else (str(row["gpu"]), format_bytes(row["gpu_memory_bytes"]))),
            f"{row['waiting']:,}", f"{row['open']:,}",
            Text(f"{_ms(row['ttft_ms'])} / {_ms(row['ttft_p99_ms'])}", style="red" if late else ""),
            format_ms(row["ttft_slo_ms"]), "-" if row["attainment"] is None else f"{row['attainment']:.1%}",
            _ms(row["tpot_ms"]), format_ms(row["tpot_slo_ms"]),
            f"{_ms(row['answer_ms'])} / {_ms(row['answer_p99_ms'])}",
            f"{row['failed']:,}", f"{sum(row['switches'].values()):,}", f"{sum(row['switch_s'].values()):.1f} s",
        )  # fmt: skip
    parts: list[RenderableType] = [head, Text(), table, Text(OF_STREAMS, style="dim")]
    faults = [f"{row['name']}: {row['fault']}" for row in status["models"] if row["fault"]]
    if status.get("agent_fault"):
        faults.insert(0, status["agent_fault"])
    if faults:
        parts += [Text(), *(Text(f"\u26a0 {text}", style="yellow") for text in faults[:6])]
    if lost:
        parts.append(Text(lost, style="bold red"))
    return Group(*parts)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
