"""Prints tables of results about requests to language models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

HEADS = ("requests", "answered", "TTFT p50", "TTFT p99", "TTFT SLO", "TPOT p50", "TPOT p99", "TPOT SLO", "in time",
         "good/s", "tokens/s", "switches", "move s")  # fmt: skip
DISPENSABLE = ("move s", "tokens/s", "answered", "TPOT SLO", "TTFT SLO", "good/s", "requests")


def show(content: Mapping[str, Any], title: str) -> None:
    """Print one row of figures per model, and the use of the GPUs."""
    from rich.markup import escape

    from cotenant.cli.fitting import figures_table, print_fitting

    rows: dict[str, Mapping[str, Any]] = dict(content["models"])
    if len(rows) > 1:
        rows["all"] = content["total"]
    heads = [h for h in HEADS if h not in ("switches", "move s") or "gpus" in content]

    def build(shown: Sequence[str]) -> Table:
        table = figures_table(f"{title}; TTFT and TPOT in ms", "model", shown)
        for name, row in rows.items():
            cells = _cells(row)
            table.add_row(escape(name), *(cells[head] for head in shown))
        return table

    print_fitting(build, build, heads, DISPENSABLE)
    if "gpus" in content:
        used = ", ".join(f"{g['busy']:.0%}" for g in content["gpus"])
        moved = f"{content['switches']} switches in {content['span_s']:.1f} s"
        print(f"GPUs busy {used}; {moved}, {content['sharing']} shares")


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    def at(name: str, p: str) -> str:
        return "-" if row[name] is None else f"{row[name][p]:.1f}"

    def target(name: str) -> str:
        return "-" if row.get(name) is None else f"{row[name]:g}"

    moves = sum(row.get(k, 0) for k in ("starts", "evictions", "returns", "stops"))
    return {
        "requests": f"{row['requests']:,}", "answered": f"{row['answered']:,}",
        "TTFT p50": at("ttft_ms", "p50"), "TTFT p99": at("ttft_ms", "p99"), "TTFT SLO": target("ttft_target_ms"),
        "TPOT p50": at("tpot_ms", "p50"), "TPOT p99": at("tpot_ms", "p99"), "TPOT SLO": target("tpot_target_ms"),
        "in time": "-" if row["attainment"] is None else f"{row['attainment']:.2%}",
        "good/s": f"{row['goodput_rps']:.2f}", "tokens/s": f"{row['output_tokens_per_s']:,.0f}",
        "switches": f"{moves:,}" if "starts" in row else "-",
        "move s": f"{row['move_s']:.1f}" if "move_s" in row else "-",
    }  # fmt: skip
