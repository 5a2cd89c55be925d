"""One self-contained HTML page for any number of runs: works offline, in light and dark, on wide and narrow screens."""

from __future__ import annotations

import contextlib
import html
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from cotenant.core.errors import InputError
from cotenant.core.files import atomic_file
from cotenant.core.metrics.registry import lookup
from cotenant.report.distributions import cdf_points, ratio_to, rounded
from cotenant.report.embed import shell
from cotenant.report.runs import Run, arrange, facet_name, moves_note
from cotenant.report.table import COLUMNS, Column, best_rows, cell_texts
from cotenant.report.text import count_text, metric_text, plural, time_text

SERIES = ("running", "waiting", "gpu", "cpu", "memory", "useful_cpu", "useful_memory", "wanted", "stranded")
LEVEL = 1.005  # a policy counts as one of the best if its mean JCT is at most this times the smallest
SPREADS_SHOWN = ("jct_s", "queueing_s", "slowdown", "ftf_rho")


def write_page(path: str | Path, runs: list[Run], title: str = "Cotenant runs", baseline: str | None = None) -> None:
    """Write the page for `runs` atomically.

    `baseline`: the policy with which the other policies are compared job by job. None: the policy that orders jobs by
    arrival (fifo) and gives them CPU cores and memory in proportion to their GPUs, if it is among the runs, else the
    first run's. Raises InputError if the file cannot be written or no run has that policy.
    """
    page = build_page(runs, title, baseline)
    with atomic_file(path) as file:
        file.write(page)


def build_page(runs: list[Run], title: str = "Cotenant runs", baseline: str | None = None) -> str:
    """Return the page about the runs as text. Runs get unique labels and the facets (options) in which they differ."""
    arrange(runs)
    head = (
        f'<p class="lede">{lede(runs)}</p>\n    <p class="headline">{headline(runs)}</p>\n'
        f'    <div class="tiles">\n{tiles(runs)}\n    </div>'
    )
    parts = {
        "table": table_html(runs),
        "moves": html.escape(moves_note((run.info, run.summary) for run in runs) or ""),
        "conditions": conditions_html(runs),
    }
    data = page_data(runs, pick_baseline(runs, baseline))
    single = " data-single" if len(runs) == 1 else ""
    return shell(title, head, "page.html", parts, data, ("base.js", "charts.js", "page.js"), single)


def pick_baseline(runs: list[Run], wanted: str | None = None) -> str:
    """Return the policy with which the others are compared; InputError if no run has it."""
    policies = list(dict.fromkeys(run.policy for run in runs))
    if wanted is not None:
        if wanted not in policies:
            known = ", ".join(repr(policy) for policy in policies)
            raise InputError(f"no run of policy {wanted!r}; known: {known}", field="--baseline")
        return wanted
    plain = [run.policy for run in runs if run.info.options.get("ordering") == "fifo"]
    return next((policy for policy in plain if "proportional" in policy), policies[0])


def page_data(runs: list[Run], baseline: str) -> dict[str, Any]:
    """Return everything that the page's charts draw, as plain data."""
    policies = list(dict.fromkeys(run.policy for run in runs))
    by_policy = len(policies) > 1 or len(runs) == 1
    return {
        "runs": [
            {
                "label": run.label,
                "policy": run.policy,
                "color": policies.index(run.policy) if by_policy else i,
                "facets": run.facets,
                "load": run.load,
                "summary": run.summary,
                "cdf": {key: cdf_points(run.spreads[key]) for key in SPREADS_SHOWN},
                "ratio": _ratio(run, runs, baseline),
                "series": _series(run),
                "groups": {
                    name: [
                        [e["group"], e["jobs"], *(rounded(e["jct_s"][k]) for k in ("mean", "median", "p99"))]
                        for e in entries
                    ]
                    for name, entries in run.groups.items()
                },
                "groupCounts": run.group_counts,
            }
            for i, run in enumerate(runs)
        ],
        "policies": policies,
        "byPolicy": by_policy,
        "facets": _facets(runs),
        "opens": opening(runs),
        "baseline": baseline,
    }


def _series(run: Run) -> dict[str, Any]:
    series = run.series
    values = {name: rounded(getattr(series, name).tolist()) for name in SERIES}
    if run.summary["fragmentation"] is None:
        values["stranded"] = None
    return {"from": float(series.edges_s[0]), "to": float(series.edges_s[-1]), **values}


def _ratio(run: Run, runs: list[Run], baseline: str) -> dict[str, Any] | None:
    """Return each job's completion time compared with that under the baseline policy in the same conditions."""
    base = next((r for r in runs if r.policy == baseline and r.facets == run.facets), None)
    if base is None or base is run or run.policy == base.policy or len(base.ids) != len(run.ids):
        return None
    if not np.array_equal(base.ids, run.ids):
        return None
    return ratio_to(run.spreads["jct_s"], base.spreads["jct_s"])


def _facets(runs: list[Run]) -> list[dict[str, Any]]:
    facets = []
    for key in runs[0].facets if runs else ():
        values = list(dict.fromkeys(run.facets[key] for run in runs))
        with contextlib.suppress(ValueError):  # values of a condition that are not numbers keep their order
            values = sorted(values, key=lambda text: float(text.split("/")[0]))
        facets.append({"key": key, "name": facet_name(key), "values": values})
    return facets


def opening(runs: list[Run]) -> dict[str, str]:
    """Return the condition (options of a run) that a page shows first: the one with the largest ratio between the
    policies' mean completion times; of conditions with the same ratio, the last.

    A condition with a single policy is used only if there is no other.
    """
    best, facets = -1.0, dict(runs[0].facets) if runs else {}
    for condition in dict.fromkeys(tuple(run.facets.items()) for run in runs):
        here = [run for run in runs if tuple(run.facets.items()) == condition]
        means = [mean for run in here if (mean := run.summary["jct_s"]["mean"])]
        spread = max(means) / min(means) if means and len({run.policy for run in here}) > 1 else 0.0
        if spread >= best:
            best, facets = spread, dict(condition)
    return facets


# ---- text


def lede(runs: list[Run]) -> str:
    """Return the line under the title: how many runs, jobs and GPUs."""
    jobs = sorted({run.summary["jobs"] for run in runs})
    gpus = sorted({int(run.info.cluster.get("gpus") or 0) for run in runs})
    pieces = [plural(len(runs), "run")]
    pieces.append(" to ".join(count_text(n) for n in ([jobs[0], jobs[-1]] if len(jobs) > 1 else jobs)) + " jobs")
    pieces.append(" to ".join(count_text(n) for n in ([gpus[0], gpus[-1]] if len(gpus) > 1 else gpus)) + " GPUs")
    return html.escape(" · ".join(pieces))


def headline(runs: list[Run]) -> str:
    """Return the main result of the runs in a sentence: which policy finishes jobs soonest, and compared with which."""
    finished = [run for run in runs if run.summary["jct_s"]["mean"] is not None]
    if not finished:
        return "No job finished in these runs."
    if len(finished) == 1:
        summary = finished[0].summary
        return (
            f"Under <b>{html.escape(finished[0].label)}</b> a job takes {_time(summary['jct_s']['mean'])} on "
            f"average, {_time(summary['queueing_s']['mean'])} of that waiting."
        )
    if len({tuple(run.facets.items()) for run in finished}) > 1:
        return _headline_over_conditions(finished)
    ranked = sorted(finished, key=lambda run: run.summary["jct_s"]["mean"])
    best, worst = ranked[0], ranked[-1]
    fast, slow = best.summary["jct_s"]["mean"], worst.summary["jct_s"]["mean"]
    if fast >= slow * 0.995:
        return f"All {len(finished)} runs finish a job in about {_time(fast)} on average."
    return (
        f"<b>{html.escape(best.label)}</b> finishes a job in {_time(fast)} on average, {_sooner(fast, slow)} than "
        f"<b>{html.escape(worst.label)}</b> ({_time(slow)})."
    )


def _headline_over_conditions(runs: list[Run]) -> str:
    """Return sentences that say under which conditions which policy is best; runs that differ only in the seed are
    repetitions of a condition, and a policy's mean is taken over them.
    """
    means: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for run in runs:
        condition = tuple((key, value) for key, value in run.facets.items() if key != "seed")
        means.setdefault(condition, {})[run.policy] = 0.0
    for condition, by_policy in means.items():
        for policy in by_policy:
            here = [r for r in runs if r.policy == policy and all(r.facets[k] == v for k, v in condition)]
            by_policy[policy] = sum(r.summary["jct_s"]["mean"] for r in here) / len(here)
    seeds = len({run.facets["seed"] for run in runs if "seed" in run.facets})
    over = f", {seeds} seeds each" if seeds > 1 else ""
    best = [{p for p, mean in by.items() if mean <= LEVEL * min(by.values())} for by in means.values()]
    wins = Counter(policy for policies in best for policy in policies)
    # among policies that are best equally often, the one with the lowest sum of mean times is named
    winner = min(sorted(wins), key=lambda p: (-wins[p], sum(by.get(p, 0.0) for by in means.values())))
    won, level = wins[winner], any(winner in policies and len(policies) > 1 for policies in best)
    name = f"<b>{html.escape(winner)}</b>"
    if len({run.policy for run in runs}) == 1:
        every = [by_policy[winner] for by_policy in means.values()]
        span = f"{_time(min(every))} to {_time(max(every))}" if len(every) > 1 else _time(every[0])
        return f"{name} finishes a job in {span} on average over {plural(len(means), 'condition')}{over}."
    where = f"in {won} of {len(means)} conditions{over}" if len(means) > 1 else f"over {seeds} seeds"
    text = f"{name} has the lowest mean completion time{', alone or level with others,' if level else ''} {where}"
    gains = [
        (mean / by_policy[winner], policy, mean)
        for by_policy in means.values()
        if winner in by_policy
        for policy, mean in by_policy.items()
    ]
    ratio, policy, slow = max(gains)
    if ratio > 1.005:
        text += f", at best {_sooner(slow / ratio, slow)} than <b>{html.escape(policy)}</b>"
    return text + "."


def _time(seconds: float | None) -> str:
    return time_text(seconds, trim=False)


def _sooner(fast: float, slow: float) -> str:
    return f"{slow / fast:.1f}× sooner" if slow >= 2 * fast else f"{(1 - fast / slow) * 100:.0f} % sooner"


# key of the metric, title of its tile if the page has several runs, title if the page has one
TILES = (
    ("jct_s.mean", "Lowest mean JCT", "Mean JCT"),
    ("jct_s.p99", "Lowest p99 JCT", "p99 JCT"),
    ("makespan_s", "Shortest makespan", "Makespan"),
    ("slowdown.mean", "Lowest mean slowdown", "Mean slowdown"),
)


def tiles(runs: list[Run]) -> str:
    """Return HTML of four figures, each with the run that has its best value."""
    columns = {column.key: column for column in COLUMNS}
    cells = []
    for key, best, plain in TILES:
        metric = columns[key].metric
        known = [(value, run) for run in runs if (value := lookup(run.summary, key)) is not None]
        if not known:
            continue
        pick = min if metric.better == "lower" else max
        value, run = pick(known, key=lambda pair: pair[0])
        label = best if len(runs) > 1 else plain
        cells.append(
            f'<div class="tile" data-key="{key}" data-unit="{metric.unit}" data-better="{metric.better}">'
            f'<span class="tile-name">{label}</span>'
            f'<span class="tile-value">{metric_text(value, metric.unit)}</span>'
            f'<span class="tile-run">{html.escape(run.label) if len(runs) > 1 else ""}</span></div>'
        )
    return "\n".join(cells)


def table_html(runs: list[Run]) -> str:
    """Return the table of runs as HTML, readable without scripts, sortable and filterable with them."""
    summaries = [run.summary for run in runs]
    columns = [c for c in COLUMNS if any(lookup(s, c.key) is not None for s in summaries)]
    if all(s["jobs_completed"] == s["jobs"] for s in summaries):
        columns = [c for c in columns if c.key != "jobs_completed"]
    best = {column.key: best_rows(summaries, column) for column in columns}
    texts = {column.key: cell_texts(summaries, column) for column in columns}
    leads = {c.key for i, c in enumerate(columns) if i == 0 or c.group != columns[i - 1].group}
    rows = []
    for i, run in enumerate(runs):
        cells = []
        for column in columns:
            value = lookup(run.summary, column.key)
            classes = ["lead"] if column.key in leads else []
            classes += ["best"] if i in best[column.key] else []
            classes += ["bar-cell"] if column.key == "jct_s.mean" else []
            raw = "" if value is None else f' data-v="{value:.6g}"'
            text = texts[column.key][i]
            cells.append(f'<td class="{" ".join(classes)}"{raw}><span>{text}</span></td>')
        # the controls above the table show the conditions if scripts run, so the label need only show the policy
        rest = f'<span class="cond">{html.escape(run.label.removeprefix(run.policy))}</span>'
        name = f'<th scope="row"><i class="swatch"></i>{html.escape(run.policy)}{rest}</th>'
        rows.append(f'<tr data-run="{i}">{name}{"".join(cells)}</tr>')
    return f"<thead>{_table_heads(columns, leads)}</thead><tbody>{''.join(rows)}</tbody>"


def _table_heads(columns: list[Column], leads: set[str]) -> str:
    over = ['<th scope="col"></th>']
    heads = ['<th scope="col"><button type="button">Run</button></th>']
    for column in columns:
        lead = ' class="lead"' if column.key in leads else ""
        if lead:
            span = sum(c.group == column.group for c in columns)
            over.append(f'<th scope="colgroup" class="lead" colspan="{span}">{column.group}</th>')
        button = f'<button type="button">{html.escape(column.short or column.head)}</button>'
        heads.append(f'<th scope="col"{lead} data-better="{column.better}">{button}</th>')
    return f'<tr class="over">{"".join(over)}</tr><tr class="heads">{"".join(heads)}</tr>'


def conditions_html(runs: list[Run]) -> str:
    """Return the conditions of the runs as HTML, for the end of the page: trace, cluster, seed, options, what was left
    out of the trace, and remarks from the reading of the trace.
    """
    blocks = []
    for run in runs:
        info = run.info
        rows = {
            "trace": info.trace.get("source"),
            "cluster": info.cluster.get("description"),
            "seed": info.seed,
            **info.options,
            "left out of the trace": "; ".join(f"{n} {why}" for why, n in (info.trace.get("left_out") or {}).items()),
            "remarks": "; ".join(info.trace.get("remarks") or []),
        }
        pairs = "".join(
            f"<dt>{html.escape(str(key))}</dt><dd>{html.escape(str(value))}</dd>"
            for key, value in rows.items()
            if value not in (None, "")
        )
        blocks.append(f"<details><summary>{html.escape(run.label)}</summary><dl>{pairs}</dl></details>")
    return "\n".join(blocks)
