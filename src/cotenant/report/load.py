"""One self-contained HTML page for a load test: figures, latencies against SLOs, and their course over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cotenant.core.files import atomic_file
from cotenant.loadgen.loop import LATE, OK
from cotenant.loadgen.result import LoadResult
from cotenant.report.embed import lead, shell
from cotenant.report.serving import POINTS, WINDOWS, in_time, service_table


def write_page(path: str | Path, result: LoadResult, title: str = "Load test") -> None:
    """Write the page atomically."""
    page = build_page(result, title)
    with atomic_file(path) as file:
        file.write(page)


def build_page(result: LoadResult, title: str = "Load test") -> str:
    """The page as text."""
    parts = {"table": service_table(result.summary()["services"])}
    return shell(title, lead(headline(result)), "serving.html", parts, page_data(result), ("serving.js",))


def headline(result: LoadResult) -> str:
    """The result in a few sentences, including the part of the latencies that the load generator caused."""
    content = result.summary()
    text = [
        f"{content['requests']:,} requests in {content['duration_s']:g} s to {result.url or 'a server'} "
        f"(seed {result.seed})."
    ]
    rows = {name: row for name, row in content["services"].items() if row["slo_attainment"] is not None}
    if rows:
        worst = min(rows, key=lambda name: rows[name]["slo_attainment"])
        text.append(in_time(worst, rows[worst]["slo_attainment"]))
    late = content["lateness_ms"]
    if late["p99"] is not None:
        text.append(
            f"Requests left {late['p50']:.2f} ms after their time in the median, 99 % within {late['p99']:.2f} ms."
        )
    notes = result.warnings() if result.fault is None else [result.fault, *result.warnings()]
    return " ".join([*text, *(f"Note: {note}." for note in notes)])


def page_data(result: LoadResult) -> dict[str, Any]:
    """Data of the page's curves: for each service, the distribution of latency relative to its SLO, and attainment in
    windows."""
    rows, latency = result.rows, result.latency_ms
    edges = np.linspace(0.0, result.duration_s, WINDOWS + 1)
    where = np.clip(np.searchsorted(edges, rows["scheduled"], side="right") - 1, 0, WINDOWS - 1)
    answered = (rows["outcome"] == OK) | (rows["outcome"] == LATE)
    curves = []
    for s, service in enumerate(result.services):
        mine = rows["svc"] == s
        times = np.sort(latency[mine & answered])
        at = np.unique(np.linspace(0, len(times) - 1, POINTS).astype(int)) if len(times) else np.zeros(0, int)
        sent = np.bincount(where[mine], minlength=WINDOWS)
        ok = np.bincount(where[mine & (rows["outcome"] == OK)], minlength=WINDOWS)
        curves.append(
            {
                "name": service.name,
                "slo_ms": service.slo_ms,
                "latency_ms": [round(float(x), 4) for x in times[at]],
                "share": [round((float(i) + 1) / max(1, int(mine.sum())), 6) for i in at],
                "attainment": [None if n == 0 else round(float(k / n), 5) for k, n in zip(ok, sent, strict=True)],
            }
        )
    middles = [round(float(x), 4) for x in (edges[:-1] + edges[1:]) / 2]
    return {"services": curves, "windows_s": middles, "gpulets": []}
