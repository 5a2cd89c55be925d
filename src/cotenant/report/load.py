"""One self-contained HTML page for a load test: figures, latencies against SLOs, and their course over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cotenant.core.files import atomic_file
from cotenant.loadgen.loop import LATE, OK
from cotenant.loadgen.result import LoadResult
from cotenant.report.distributions import Windows, latency_curve
from cotenant.report.embed import lead, shell
from cotenant.report.serving import in_time, sent_late, service_table


def write_page(path: str | Path, result: LoadResult, title: str = "Load test") -> None:
    """Write the page of a load test atomically."""
    with atomic_file(path) as file:
        file.write(build_page(result, title))


def build_page(result: LoadResult, title: str = "Load test") -> str:
    """Return the page of a load test as text."""
    parts = {"table": service_table(result.summary()["services"])}
    return shell(title, lead(headline(result)), "serving.html", parts, page_data(result), ("serving.js",))


def headline(result: LoadResult) -> str:
    """Return the load test's result in a few sentences, including the part of the latencies that the load generator
    caused.
    """
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
        text.append(sent_late(late))
    notes = result.warnings() if result.fault is None else [result.fault, *result.warnings()]
    return " ".join([*text, *(f"Note: {note}." for note in notes)])


def page_data(result: LoadResult) -> dict[str, Any]:
    """Return the data of the page's curves: for each service, the distribution of latency relative to its SLO, and
    attainment in windows.
    """
    rows, latency = result.rows, result.latency_ms
    windows = Windows(rows["scheduled"], result.duration_s)
    answered = (rows["outcome"] == OK) | (rows["outcome"] == LATE)
    curves = []
    for s, service in enumerate(result.services):
        mine = rows["svc"] == s
        curve = latency_curve(service.name, service.slo_ms, latency[mine & answered], int(mine.sum()))
        curves.append(curve | {"attainment": windows.attainment(mine, rows["outcome"] == OK)})
    return {"services": curves, "windows_s": [round(float(x), 4) for x in windows.middles], "gpulets": []}
