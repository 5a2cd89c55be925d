"""One self-contained HTML page for a load test of language models: distributions of TTFT and TPOT against promises."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import numpy as np

from cotenant.core.files import atomic_file
from cotenant.loadgen.openai import OpenAiResult
from cotenant.report.distributions import cdf_points, rounded
from cotenant.report.embed import asset, plotly, script_json

WINDOWS = 60
HEADS = (
    ("requests", "requests"), ("answered", "answered"), ("ttft_ms", "TTFT p50 / p99 ms"),
    ("tpot_ms", "TPOT p50 / p99 ms"), ("attainment", "in time"), ("goodput_rps", "goodput /s"),
    ("output_tokens_per_s", "tokens /s"),
)  # fmt: skip


def write_page(path: str | Path, result: OpenAiResult) -> None:
    """Write the page; the file appears whole or not at all."""
    page = build_page(result)
    with atomic_file(path) as file:
        file.write(page)


def build_page(result: OpenAiResult) -> str:
    """The page as text."""
    content = result.summary()
    late = content["lateness_ms"]
    text = f"{len(result.outcome):,} requests in {result.duration_s:.1f} s to {content['url']}, seed {content['seed']}."
    if late["p50"] is not None:
        text += f" Requests left {late['p50']:.2f} ms after their time in the median, 99 % within {late['p99']:.2f} ms."
    parts = {
        "headline": html.escape(text),
        "table": _table(content),
        "css": asset("report.css"),
        "data": script_json(page_data(result)),
        "js": asset("llm.js"),
        "plotly": plotly(),
    }
    page = asset("llm.html")
    for key, part in parts.items():
        page = page.replace("{{" + key + "}}", part)
    return page


def _table(content: dict[str, Any]) -> str:
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in ("model", *(h for _, h in HEADS)))
    rows = []
    for name, row in {**content["models"], "all": content["total"]}.items():
        cells = "".join(f"<td>{_cell(row[key])}</td>" for key, _ in HEADS)
        rows.append(f"<tr><td>{html.escape(name)}</td>{cells}</tr>")
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return f"{value['p50']:.1f} / {value['p99']:.1f}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def page_data(result: OpenAiResult) -> dict[str, Any]:
    """Curves: distributions per model, attainment in windows of the run."""
    times, promises = result.times, result.test.promises
    kept = times.kept(promises)
    edges = np.linspace(0.0, max(float(times.due_s.max()), 1e-3), WINDOWS + 1)
    where = np.clip(np.searchsorted(edges, times.due_s, side="right") - 1, 0, WINDOWS - 1)
    models = []
    for index, promise in enumerate(promises):
        mine = times.model == index
        sent = np.bincount(where[mine], minlength=WINDOWS)
        good = np.bincount(where[mine & kept], minlength=WINDOWS)
        models.append({
            "name": promise.name,
            "ttft": cdf_points(times.ttft_ms[mine]) | {"promise": promise.ttft_ms},
            "tpot": cdf_points(times.tpot_ms[mine]) | {"promise": promise.tpot_ms},
            "attainment": [None if n == 0 else rounded(float(g / n)) for g, n in zip(good, sent, strict=True)],
        })  # fmt: skip
    return {"models": models, "windows_s": rounded(((edges[:-1] + edges[1:]) / 2).tolist())}
