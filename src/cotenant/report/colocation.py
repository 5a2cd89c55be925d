"""A page for `cotenant bench colocation`: the frontier of LS latency against BE work, and latencies by load."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from cotenant.record.files import atomic_file

Rows = dict[str, dict[str, dict[str, Any]]]  # scheme -> BE load -> figures
COLUMNS = (
    ("ls_p50_ms", "LS p50, ms", "{:.2f}"),
    ("ls_p99_ms", "LS p99, ms", "{:.2f}"),
    ("ls_p99_over_alone", "p99 over alone", "{:.2f}"),
    ("slo_attainment", "in time", "{:.1%}"),
    ("be_over_alone", "BE over alone", "{:.1%}"),
    ("be_over_left", "BE of what LS leaves", "{:.1%}"),
)
PROMISE_P99, PROMISE_BE = 1.05, 0.95


def table(rows: Rows) -> list[list[str]]:
    """Head and lines of text, one per scheme and BE load."""
    lines = [["scheme", "beside", *(title for _, title, _ in COLUMNS)]]
    for scheme, loads in rows.items():
        for load, row in loads.items():
            lines.append([scheme, load, *(form.format(row[key]) for key, _, form in COLUMNS)])
    return lines


def figures(rows: Rows) -> list[Any]:
    """The frontier (BE work against p99, a point per BE load) and p99 by BE load, as plotly figures."""
    import plotly.graph_objects as go

    frontier, bars = go.Figure(), go.Figure()
    for scheme, loads in rows.items():
        names = list(loads)
        work = [100 * loads[name]["be_over_left"] for name in names]
        p99 = [loads[name]["ls_p99_over_alone"] for name in names]
        interval = [loads[name].get("ls_p99_over_alone_ci95") or [p, p] for name, p in zip(names, p99, strict=True)]
        error = {
            "type": "data",
            "symmetric": False,
            "array": [max(0.0, high - p) for (_, high), p in zip(interval, p99, strict=True)],
            "arrayminus": [max(0.0, p - low) for (low, _), p in zip(interval, p99, strict=True)],
        }
        frontier.add_trace(
            go.Scatter(x=work, y=p99, text=names, name=scheme, mode="markers", error_y=error, marker={"size": 10})
        )
        bars.add_trace(go.Bar(x=names, y=p99, name=scheme, error_y=error))
    frontier.update_layout(
        title="LS latency against BE work: right and down is better",
        xaxis_title="BE work, % of the time that LS leaves",
        yaxis_title="LS p99 over alone",
        yaxis_type="log",
    )
    frontier.add_hline(y=PROMISE_P99, line_dash="dot", annotation_text="p99 +5 %")
    frontier.add_vline(x=100 * PROMISE_BE, line_dash="dot", annotation_text="BE 95 %")
    bars.update_layout(title="LS p99 over alone by BE load", yaxis_title="LS p99 over alone", yaxis_type="log")
    return [frontier, bars]


def build_page(rows: Rows, title: str) -> str:
    """The page as text; one file, no network."""
    head, *lines = table(rows)
    cells = "".join(f"<th>{html.escape(text)}</th>" for text in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in line) + "</tr>" for line in lines)
    parts = [figure.to_html(full_html=False, include_plotlyjs=index == 0) for index, figure in enumerate(figures(rows))]
    style = (
        "body{font:15px/1.45 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}"
        "table{border-collapse:collapse}th,td{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #ddd}"
        "th:first-child,td:first-child,th:nth-child(2),td:nth-child(2){text-align:left}"
    )
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<style>{style}</style><h1>{html.escape(title)}</h1>{''.join(parts)}"
        f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></html>"
    )


def write_page(path: str | Path, rows: Rows, title: str) -> None:
    """Write the page; the file appears whole or not at all."""
    page = build_page(rows, title)
    with atomic_file(path) as file:
        file.write(page)
