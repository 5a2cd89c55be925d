"""The data about each run that reports show, and the options in which runs differ."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cotenant.core.metrics.cluster import Series
from cotenant.core.metrics.registry import SPREAD_METRICS, lookup
from cotenant.core.metrics.summary import Analysis, breakdown
from cotenant.core.power import watts
from cotenant.core.record.record import Record
from cotenant.core.record.schema import RunInfo

MOST_GROUPS = 12  # a breakdown has at most this many groups; the rarest ones are left out
Floats = NDArray[np.float64]


@dataclass
class Run:
    """One run, reduced to metrics, distributions and time lines. The record itself is not kept."""

    info: RunInfo
    summary: dict[str, Any]
    spreads: dict[str, Floats]  #: metric -> value for each job, in the order of the jobs table; NaN if the job has none
    series: Series
    groups: dict[str, list[dict[str, Any]]]  #: breakdowns of the metrics by "gpus", "class", "model" and "tenant"
    group_counts: dict[str, int]  #: number of all groups of each breakdown, of which `groups` has at most MOST_GROUPS
    ids: NDArray[np.object_]
    path: Path | None = None
    policy: str = ""  #: name of the run's policy; a report with several policies compares them, each in its own colour
    #: the policy and, if that is not unique in the report, the facets (options in which the runs differ)
    label: str = ""
    facets: dict[str, str] = field(default_factory=dict)  #: the conditions in which the runs of this policy differ
    load: float | None = None  #: x value of the run in curves over the load; None if the run has no load


def run_of(record: Record, families: dict[str, str] | None = None) -> Run:
    """Reduce a record to a Run. `families`: model name -> class (image, language ...), for the breakdown by class."""
    analysis = Analysis(record)
    groups, counts = _groups(record, analysis, families or {})
    return Run(
        info=record.info,
        summary=analysis.summary,
        spreads={key: analysis.values(key) for key in SPREAD_METRICS},
        series=analysis.series(),
        groups=groups,
        group_counts=counts,
        ids=record.job("id"),
        path=record.path,
        policy=record.info.label,
        label=record.info.label,
    )


def _groups(
    record: Record, analysis: Analysis, families: dict[str, str]
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, int]]:
    models = record.jobs["model"].fill_null("")
    columns = {
        "gpus": record.job("gpus"),
        "class": models.replace_strict(families, default="").to_numpy() if families else np.array([]),
        "model": models.to_numpy(),
        "tenant": record.jobs["tenant"].fill_null("").to_numpy(),
    }
    found, counts = {}, {}
    for name, values in columns.items():
        if len(values) == 0 or len(np.unique(values)) < 2:
            continue
        entries = breakdown(analysis, values)
        counts[name] = len(entries)
        common = sorted(sorted(entries, key=lambda e: -e["jobs"])[:MOST_GROUPS], key=lambda e: entries.index(e))
        found[name] = [{**entry, "group": _group_name(name, entry["group"])} for entry in common]
    return found, counts


def _group_name(by: str, value: Any) -> str:
    if by == "gpus":
        return f"{value:g} GPU{'' if value == 1 else 's'}"
    return str(value) or "(none)"


def arrange(runs: list[Run]) -> list[Run]:
    """Give the runs of one report unique labels, and find how they differ: by policy, and in what else.

    The label in a run's record (`info.label`) names its policy. Several runs of one policy differ in conditions (load,
    seed, split, cluster, trace ...). The conditions that differ become the runs' facets, and parts of their new labels.
    """
    for run in runs:
        run.policy = run.label = run.info.label
        run.facets, run.load = {}, load_of(run.info)
    conditions = [_conditions(run.info) for run in runs]
    shared = {policy for policy, n in Counter(run.policy for run in runs).items() if n > 1}
    keys = list(dict.fromkeys(key for run_conditions in conditions for key in run_conditions))
    varying = [
        key
        for key in keys
        if any(
            len({c.get(key, "") for r, c in zip(runs, conditions, strict=True) if r.policy == p}) > 1 for p in shared
        )
    ]
    # a trace that is drawn again for each load and seed differs for that reason alone, so it is no condition of its own
    for key in ("trace", "cluster", "rate"):
        rest = [other for other in varying if other != key]
        if key in varying and rest and _determined(key, rest, conditions):
            varying = rest
    _shorten_paths(conditions)
    for run, run_conditions in zip(runs, conditions, strict=True):
        run.facets = {key: run_conditions.get(key, "–") for key in varying}
    for policy in shared:
        _label([run for run in runs if run.policy == policy], varying)
    _number_the_rest(runs)
    return runs


def _label(runs: list[Run], varying: list[str]) -> None:
    """Label the runs of one policy with the facets in which they differ from each other. Where the trace determines
    another facet, such as its cluster, only the trace is shown."""
    keys = [key for key in varying if len({run.facets[key] for run in runs}) > 1]
    if "trace" in keys:
        facets = [run.facets for run in runs]
        keys = [key for key in keys if key == "trace" or not _determined(key, ["trace"], facets)]
    for run in runs:
        run.label = " · ".join([run.policy, *(f"{facet_name(key)} {run.facets[key]}" for key in keys)])


def in_order(runs: list[Run]) -> list[Run]:
    """Sort arranged runs by policy, then by their conditions, numbers by size. The order of their folders' names means
    nothing.
    """

    def natural(text: str) -> tuple[tuple[float, str], ...]:
        pieces = re.findall(r"\d+\.?\d*|\D+", text)
        return tuple((float(p), "") if p[0].isdigit() else (math.inf, p) for p in pieces)

    return sorted(runs, key=lambda run: (run.policy, *(natural(value) for value in run.facets.values())))


def moves_note(runs: Iterable[tuple[RunInfo, dict[str, Any]]]) -> str | None:
    """Return a note about moves in the runs (info, summary) in which moving cost nothing; None if every move had a cost
    or no job moved.
    """
    moved = [info.options for info, summary in runs if summary["moves"]]
    free = [o for o in moved if o.get("restart_cost_s") == 0 and o.get("checkpoint_cost_s") == 0]
    if not free:
        return None
    where = "here" if len(free) == len(moved) else "in some of these runs"
    return (
        f"Moving is free {where}: restart and checkpoint cost are 0, so jobs move whenever it helps at all. "
        "--restart-cost and --checkpoint-cost charge for it."
    )


def energy_note(runs: Iterable[tuple[RunInfo, dict[str, Any]]]) -> str | None:
    """Return a note about the GPUs whose watts are unknown, so that their runs (info, summary) have no energy."""
    without = [info for info, summary in runs if lookup(summary, "energy.total_j") is None]
    models = dict.fromkeys(str(model) for info in without for model in info.cluster.get("gpu_models") or ())
    unknown = [model for model in models if watts(model) is None]
    return f"No energy of runs with {', '.join(unknown)}: the watts of these GPUs are not known." if unknown else None


def unlike_note(runs: Sequence[Run]) -> str | None:
    """Return a note about runs of different traces, clusters or numbers of jobs; None if all have the same."""
    unlike = []
    for name, values in (
        ("traces", [run.info.trace.get("source") for run in runs]),
        ("clusters", [run.info.cluster.get("description") for run in runs]),
        ("numbers of jobs", [run.summary["jobs"] for run in runs]),
    ):
        distinct = [str(value) for value in dict.fromkeys(values) if value is not None]
        if len(distinct) > 1:
            unlike.append(f"{name} ({', '.join(distinct[:3])}{', ...' if len(distinct) > 3 else ''})")
    if not unlike:
        return None
    return f"These runs have different {' and '.join(unlike)}, so their figures do not compare policies alone."


FACET_NAMES = {"cpus_per_node": "CPUs per node", "gpu_mix": "GPU mix", "memory_per_node": "memory per node"}


def facet_name(key: str) -> str:
    """Return the display name of a condition: "cpus_per_node" is "CPUs per node"."""
    return FACET_NAMES.get(key, key.removesuffix("_s").replace("_", " "))


def _determined(key: str, by: list[str], conditions: list[dict[str, str]]) -> bool:
    """Whether the values of the conditions `by` determine the value of the condition `key` in all runs."""
    seen: dict[tuple[str, ...], str] = {}
    for c in conditions:
        if seen.setdefault(tuple(c.get(other, "") for other in by), c.get(key, "")) != c.get(key, ""):
            return False
    return True


def _shorten_paths(conditions: list[dict[str, str]]) -> None:
    """Reduce paths of traces to file names if these are unique."""
    full = {c["trace"] for c in conditions if "trace" in c}
    short = {name: name.rsplit("/", 1)[-1] for name in full}
    if len(set(short.values())) == len(full):
        for c in conditions:
            if "trace" in c:
                c["trace"] = short[c["trace"]]


def _number_the_rest(runs: list[Run]) -> None:
    seen: Counter[str] = Counter()
    for run in runs:
        seen[run.label] += 1
        if seen[run.label] > 1:
            run.label = f"{run.label} ({seen[run.label]})"


def _conditions(info: RunInfo) -> dict[str, str]:
    conditions: dict[str, Any] = {
        "trace": info.trace.get("source"),
        "cluster": info.cluster.get("description"),
        **info.options,
        "seed": info.seed,
    }
    return {key: _short(value) for key, value in conditions.items() if value is not None}


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ",".join(_short(item) for item in value)
    return str(value)


def load_of(info: RunInfo) -> float | None:
    """Return the load of a run by its options: `load` as a fraction, else `rate` ("8/h") per hour."""
    for source in (info.options, info.trace):
        for key in ("load", "rate"):
            value = source.get(key)
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                return float(value)
            match = re.match(r"\s*([0-9.]+)", value) if isinstance(value, str) else None
            if match:
                return float(match.group(1))
    return None
