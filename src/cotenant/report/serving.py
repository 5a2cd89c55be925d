"""One self-contained HTML page for a serving run: the plan, latencies against SLOs, and their course over time."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cotenant.core.files import atomic_file
from cotenant.report.distributions import Windows, latency_curve
from cotenant.report.embed import lead, shell
from cotenant.sim.serving.engine import ServingResult


def write_page(path: str | Path, result: ServingResult, title: str = "Serving run") -> None:
    """Write the page of a serving run atomically."""
    with atomic_file(path) as file:
        file.write(build_page(result, title))


def build_page(result: ServingResult, title: str = "Serving run") -> str:
    """Return the page of a serving run as text."""
    summary = result.summary()
    head = lead(headline(result, summary))
    return shell(
        title, head, "serving.html", {"table": service_table(_rows(summary))}, page_data(result), ("serving.js",)
    )


def _rows(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {**summary["services"], **summary["applications"]}


def headline(result: ServingResult, summary: dict[str, Any]) -> str:
    """Return the result of a serving run in a sentence or two."""
    plan = result.plan
    rows = {name: row for name, row in _rows(summary).items() if row["slo_attainment"] is not None}
    text = (
        f"{summary['requests']:,} requests in {summary['duration_s']:g} s on {plan.gpus_used} GPUs cut into "
        f"{len(plan.gpulets)} gpulets (planner {plan.planner}, seed {summary['seed']})."
    )
    if not rows:
        return text
    worst = min(rows, key=lambda name: rows[name]["slo_attainment"])
    return f"{text} {in_time(worst, rows[worst]['slo_attainment'])}"


def in_time(worst: str, share: float) -> str:
    """Return a sentence on the lowest SLO attainment `share`, 0..1, and the service that has it."""
    if share == 1:
        return "Every request was answered in time."
    if share >= 0.99:
        return f"Every service answered at least {math.floor(share * 1e4) / 1e4:.2%} of its requests in time."
    return f"{worst} answered only {share:.2%} of its requests in time."


def sent_late(late: Mapping[str, Any]) -> str:
    """Return a sentence on the lateness of the requests that a load generator sent: its percentiles in ms."""
    return (
        f"Half of the requests were sent at most {late['p50']:.2f} ms after their scheduled time, 99 % at most "
        f"{late['p99']:.2f} ms."
    )


def service_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the rows of the summary, a row per service or stage, as a table's HTML."""
    # only live runs have requests that failed, so only they have this column
    failing = any(row.get("failed") for row in rows.values())
    more = ("failed",) if failing else ()
    heads = ("service", "sent", "p50 ms", "p95 ms", "p99 ms", "late", "dropped", *more, "in time")
    lines = ["<thead><tr>" + "".join(f"<th>{h}</th>" for h in heads) + "</tr></thead><tbody>"]
    for name, row in rows.items():
        ms = ["–" if row[k] is None else f"{row[k]:.1f}" for k in ("p50_ms", "p95_ms", "p99_ms")]
        share = "–" if row["slo_attainment"] is None else f"{row['slo_attainment']:.2%}"
        counts = [f"{row[k]:,}" for k in ("late", "dropped", *more)]
        cells = [f"{row['sent']:,}", *ms, *counts, share]
        lines.append(
            f"<tr><th>{html.escape(name).replace(':', ':<wbr>')}</th>"
            + "".join(f"<td>{c}</td>" for c in cells)
            + "</tr>"
        )
    return "\n".join([*lines, "</tbody>"])


def page_data(result: ServingResult) -> dict[str, Any]:
    """Return the data of the page's curves and bars. For each service: the distribution of its latency relative to its
    SLO, and its SLO attainment in each of the windows into which the run is divided. For each gpulet (part of a GPU):
    its services, and the fraction of the run for which it was busy.

    The latency of an application's stage counts from the arrival of the application's request, and its SLO is the time
    from that arrival by which the stage must be done.
    """
    rows = result.requests
    services = result.scenario.all_services()
    staged = {stage.service.name: stage.deadline_ms for _, stages in result.scenario.applications for stage in stages}
    end_ms = max(result.end_ms, result.scenario.duration_s * 1000.0)
    windows = Windows(rows["arrived"], result.scenario.duration_s * 1000.0)
    curves = []
    for s, service in enumerate(services):
        mine = rows["svc"] == s
        answered = rows[mine & ((rows["outcome"] == 1) | (rows["outcome"] == 2))]
        since = result.instances["arrived"][answered["app"]] if service.name in staged else answered["arrived"]
        slo_ms = staged.get(service.name, service.slo_ms)
        curve = latency_curve(service.name, slo_ms, answered["finished"] - since, int(mine.sum()))
        curves.append(curve | {"attainment": windows.attainment(mine, rows["outcome"] == 1)})
    return {
        "services": curves,
        "windows_s": [round(float(x) / 1000, 4) for x in windows.middles],
        "gpulets": [
            {
                "gpu": let.gpu,
                "label": let.partition,
                "percent": let.percent,
                "duty_ms": let.duty_ms,
                "seats": [f"{x.service} (batch {x.batch})" for x in let.seats],
                "busy": round(_busy_ms(rows, i) / end_ms, 4),
            }
            for i, let in enumerate(result.plan.gpulets)
        ],
    }


def _busy_ms(rows: np.ndarray, let: int) -> float:
    """Return the time in ms for which a gpulet (part of a GPU) ran batches. Each request of a batch of n adds an nth of
    the batch's time.
    """
    mine = rows[rows["let"] == let]
    return float(((mine["finished"] - mine["started"]) / np.maximum(1, mine["batch"])).sum())
