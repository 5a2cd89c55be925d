"""A page for `cotenant bench colocation`: the frontier of the latency of latency-sensitive (LS) requests against
best-effort (BE) work, and latencies by load.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from cotenant.core.files import atomic_file
from cotenant.report.embed import asset, plotly, script_json

Rows = dict[str, dict[str, dict[str, Any]]]  # scheme -> load of best-effort work -> its figures
COLUMNS = (
    ("ls_p50_ms", "LS p50, ms", "{:.2f}"),
    ("ls_p99_ms", "LS p99, ms", "{:.2f}"),
    ("ls_p99_over_alone", "p99 over alone", "{:.2f}"),
    ("slo_attainment", "in time", "{:.1%}"),
    ("be_over_alone", "BE over alone", "{:.0%}"),
    ("be_over_left", "BE of what LS leaves", "{:.1%}"),
)
PROMISE_P99, PROMISE_BE = 1.05, 0.95
COLOURS = {"temporal": "#7a7a7a", "orion": "#b8860b", "mps-plus": "#c0392b", "static": "#8e44ad", "tidal": "#1f77b4"}
SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star", "pentagon", "hexagon", "bowtie")
ROUGH_REQUESTS = 500
# best-effort work may exceed what fits in the time that latency-sensitive work leaves by this factor without a remark,
# since measurements have errors
OVER = 1.02
# Plotly would label the steps of a logarithmic axis with their first digit: 5 for 50
FACTORS = [digit * 10.0**power for power in range(-1, 5) for digit in (1, 2, 5)]
TICKS = {"tickvals": FACTORS, "ticktext": [f"{factor:g}x" for factor in FACTORS]}
LATE_PART = 0.01  # if more than this fraction of the requests is late, p99 is the latency of a late request
MOST_LATE = 4  # the remark about late requests names at most this many values
STYLE = (
    ":root{--bg:#fff;--ink:#16202c;--soft:#5a6675;--line:#c9d0d8;--grid:#e3e7ec;--kept:#eef6ee;"
    "--font:system-ui,sans-serif;color-scheme:light dark}"
    "@media(prefers-color-scheme:dark){:root{--bg:#0d1117;--ink:#e8edf3;--soft:#a0acba;--line:#3a4653;--grid:#202832;"
    "--kept:#12352a}}"
    "body{font:15px/1.45 var(--font);color:var(--ink);background:var(--bg);max-width:72rem;margin:2rem auto;"
    "padding:0 1rem}"
    ".wide{overflow-x:auto}table{border-collapse:collapse}th,td{padding:.25rem .7rem;text-align:right;"
    "border-bottom:1px solid var(--grid);white-space:nowrap}th{white-space:normal}"
    "th:first-child,td:first-child,th:nth-child(2),td:nth-child(2){text-align:left}"
    "td.first{border-top:2px solid var(--line)}tr.kept{background:var(--kept)}"
    "dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem}dt{color:var(--soft)}dd{margin:0}"
)


def short_names(names: list[str]) -> dict[str, str]:
    """Return short names of BE loads: a profile's file name, with as much of its folder as distinguishes it from the
    others.
    """
    found = {}
    for name in names:
        if not name.startswith("profile:"):
            found[name] = name
            continue
        parts = PurePath(name.removeprefix("profile:")).parts
        others = [PurePath(o.removeprefix("profile:")).parts for o in names if o != name]
        keep = 1
        while keep < len(parts) and any(o[-keep:] == parts[-keep:] for o in others):
            keep += 1
        found[name] = "/".join(parts[-keep:])
    return found


def _interval(row: Mapping[str, Any], key: str, form: str) -> str:
    low, high = row.get(f"{key}_ci95") or (None, None)
    return "" if low is None or high is None else f"{form.format(low)}\N{EN DASH}{form.format(high)}"


def kept(row: Mapping[str, Any]) -> bool:
    """Whether a scheme meets both targets: latency-sensitive requests have almost the p99 that they have without
    best-effort work, and almost all best-effort work is done that fits in the time that these requests leave.
    """
    return bool(row["ls_p99_over_alone"] <= PROMISE_P99 and row["be_over_left"] >= PROMISE_BE)


def table(rows: Rows, bounded: tuple[str, ...] = ("ls_p99_over_alone", "slo_attainment")) -> list[list[str]]:
    """Return the head and lines of a text table: by BE load, then by scheme. Schemes that meet both targets have a
    mark. `bounded`: figures that are shown with their 95 % interval.
    """
    titles: list[str] = []
    for key, title, _ in COLUMNS:
        titles += [title, *(["95 %"] if key in bounded else [])]
    lines = [["beside", "scheme", *titles]]
    loads = list(dict.fromkeys(load for found in rows.values() for load in found))
    names = short_names(loads)
    for load in loads:
        for scheme, found in rows.items():
            if load not in found:
                continue
            row, cells = found[load], []
            for key, _, form in COLUMNS:
                cells.append(form.format(row[key]))
                if key in bounded:
                    cells.append(_interval(row, key, form))
            lines.append([names[load], f"{scheme} ✓" if kept(row) else scheme, *cells])
    return lines


def notes(rows: Rows) -> list[str]:
    """Return remarks that explain the figures of the co-location benchmark to their reader."""
    every = [row for found in rows.values() for row in found.values()]
    said = [
        f"✓: LS p99 at most {PROMISE_P99 - 1:.0%} above that of LS alone, and BE work at least {PROMISE_BE:.0%} of what"
        " BE alone does in the time that LS leaves free (column BE of what LS leaves).",
        "Alone: the same arrivals without BE. In time: requests that took no longer than the 99.5th percentile of LS "
        "alone.",
    ]
    alone = [(row["ls_alone_p50_ms"], row["ls_alone_p99_ms"]) for row in every if "ls_alone_p99_ms" in row]
    if alone:
        p50, p99 = zip(*alone, strict=True)
        ranges = f"p50 {min(p50):.2f} to {max(p50):.2f} ms, p99 {min(p99):.2f} to {max(p99):.2f} ms"
        said.append(f"LS alone: {ranges}.")
    counts = [int(row["requests"]) for row in every if "requests" in row]
    if counts:
        from cotenant.core.metrics.attainment import REQUESTS_TO_TELL as NEED

        least = min(counts)
        rough = f" With {least} requests, the p99 is only rough." if least < ROUGH_REQUESTS else ""
        more = f" Distinguishing an attainment of 99 % from 99.5 % takes {NEED:,}." if least < NEED else ""
        said.append(f"Each line has at least {least:,} requests.{rough}{more}")
    if any(row["be_over_left"] > OVER for row in every):
        said.append(
            "Where BE has over 100 % of the time that LS leaves, it also ran while LS ran, or the GPU's clock was "
            "higher than while BE was alone."
        )
    return said + _paused(rows)


def _paused(rows: Rows) -> list[str]:
    """Return a remark about the values of p99 that a pause of the host determines, because 1 % of the requests or more
    began late in the measurement.
    """
    found = []
    for scheme, loads in rows.items():
        for load, row in loads.items():
            late, requests = max(row.get("late_requests") or [0]), int(row.get("requests") or 0)
            if late and late >= LATE_PART * requests:
                calm = row.get("ls_p99_over_alone_calm")
                blocks = "without the blocks that had late requests"
                without = "" if calm is None else f"; p99 over alone is {calm:.2f} {blocks}"
                words = f"{scheme} beside {short_names(list(loads))[load]} ({late} of {requests:,}{without})"
                found.append((late / requests, words))
    if not found:
        return []
    worst = [words for _, words in sorted(found, key=lambda pair: -pair[0])]
    more = f"; and {len(worst) - MOST_LATE} more" if len(worst) > MOST_LATE else ""
    return [
        "The host paused and started at least 1 % of the requests late, so the host determines p99 of "
        + "; ".join(worst[:MOST_LATE])
        + more
        + "."
    ]


def figures(rows: Rows) -> list[dict[str, Any]]:
    """Return two charts, the frontier (BE work against p99) and p99 by BE load, as Plotly takes them: {data, layout}. A
    colour per scheme, a symbol per load, in both.
    """
    frontier: list[dict[str, Any]] = []
    by_load: list[dict[str, Any]] = []
    loads = list(dict.fromkeys(load for found in rows.values() for load in found))
    names = short_names(loads)
    symbols = {load: SYMBOLS[i % len(SYMBOLS)] for i, load in enumerate(loads)}
    for index, (scheme, found) in enumerate(rows.items()):
        mine = [load for load in loads if load in found]
        p99 = [found[load]["ls_p99_over_alone"] for load in mine]
        bounds = [found[load].get("ls_p99_over_alone_ci95") or [p, p] for load, p in zip(mine, p99, strict=True)]
        error = {
            "type": "data",
            "symmetric": False,
            "array": [max(0.0, high - p) for (_, high), p in zip(bounds, p99, strict=True)],
            "arrayminus": [max(0.0, p - low) for (low, _), p in zip(bounds, p99, strict=True)],
            "thickness": 1,
        }
        marker = {"size": 11, "color": COLOURS.get(scheme, "#333"), "symbol": [symbols[load] for load in mine]}
        said = [html.escape(f"{scheme} beside {names[load]}") for load in mine]
        both = {
            "type": "scatter", "mode": "markers", "name": scheme, "legendgroup": scheme, "marker": marker,
            "y": [p if math.isfinite(p) else None for p in p99],
            "error_y": error, "hovertext": said,
        }  # fmt: skip
        frontier.append({**both, "x": [100 * found[load]["be_over_left"] for load in mine]})
        by_load.append({**both, "x": [loads.index(load) + 0.12 * (index - (len(rows) - 1) / 2) for load in mine]})
    for load in loads:
        key = {"size": 11, "color": "#777", "symbol": f"{symbols[load]}-open"}  # filled symbols are schemes
        name = html.escape(f"beside {names[load]}")
        frontier.append({"type": "scatter", "x": [None], "y": [None], "mode": "markers", "name": name, "marker": key})
    ticks = {"tickvals": list(range(len(loads))), "ticktext": [html.escape(names[load]) for load in loads]}
    work = {"title": {"text": "BE work, % of what it does alone<br>in the time that LS leaves"}}
    return [
        _figure(frontier, "LS latency against BE work: right and down is better", 520, work, 100 * PROMISE_BE),
        _figure(by_load, "LS p99 over alone, by BE work<br>(bars: 95 % intervals)", 460, ticks, None),
    ]


def _figure(
    data: list[dict[str, Any]], title: str, height: int, xaxis: dict[str, Any], promise: float | None
) -> dict[str, Any]:
    """Return a chart of points with a title, and with lines at the targets: a horizontal line at the target for LS p99
    relative to LS p99 alone and, unless `promise` is None, a vertical line at x = `promise`, the target for BE work.
    """
    dotted = {"type": "line", "line": {"dash": "dot", "width": 1.5, "color": "#777"}}
    lines = [{**dotted, "xref": "paper", "x0": 0, "x1": 1, "y0": PROMISE_P99, "y1": PROMISE_P99}]
    exponent = math.log10(PROMISE_P99)  # on a logarithmic axis, the position of a label is an exponent
    plain = {"showarrow": False, "xanchor": "left"}
    labels = [{**plain, "text": "+5 %", "x": 0, "xref": "paper", "y": exponent, "yanchor": "top"}]
    if promise is not None:
        lines.append({**dotted, "yref": "paper", "y0": 0, "y1": 1, "x0": promise, "x1": promise})
        labels.append(
            {**plain, "text": "95 %", "x": promise, "y": 1, "yref": "paper", "yanchor": "top", "xanchor": "right"}
        )
    return {
        "data": data,
        "layout": {
            "title": {"text": title}, "height": height, "shapes": lines, "annotations": labels, "showlegend": True,
            "xaxis": {"zeroline": False, "automargin": True, **xaxis},
            "yaxis": {"title": {"text": "LS p99 over alone"}, "type": "log", "automargin": True, **TICKS},
        },
    }  # fmt: skip


def build_page(rows: Rows, title: str, about: Mapping[str, str] | None = None) -> str:
    """Return the page of the co-location benchmark as HTML text, which needs no network. `about`: description of the
    run, shown at the top.
    """
    head, *lines = table(rows)
    cells = "".join(f"<th>{html.escape(text)}</th>" for text in head)
    body, last = [], ""
    for line in lines:
        first = " class='first'" if line[0] != last else ""
        last = line[0]
        tds = "".join(f"<td{first}>{html.escape(text)}</td>" for text in line)
        body.append(f"<tr class='kept'>{tds}</tr>" if line[1].endswith("✓") else f"<tr>{tds}</tr>")
    facts = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in (about or {}).items())
    said = "".join(f"<p>{html.escape(note)}</p>" for note in notes(rows))
    drawn = figures(rows)
    plots = "".join(f"<div id='figure{index}'></div>" for index in range(len(drawn)))
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>{html.escape(title)}</title>"
        f"<style>{STYLE}</style><h1>{html.escape(title)}</h1><dl>{facts}</dl>{plots}"
        f"<div class='wide'><table><thead><tr>{cells}</tr></thead><tbody>{''.join(body)}</tbody></table></div>{said}"
        f"<script type='application/json' id='data'>{script_json(drawn)}</script><script>{plotly()}</script>"
        f"<script>{asset('colocation.js')}</script></html>"
    )


def write_page(path: str | Path, rows: Rows, title: str, about: Mapping[str, str] | None = None) -> None:
    """Write the page of the co-location benchmark atomically."""
    with atomic_file(path) as file:
        file.write(build_page(rows, title, about))
