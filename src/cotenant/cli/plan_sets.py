"""`cotenant plan scenarios`: generate and plan sets of scenarios, which are services with rates and SLOs."""

from __future__ import annotations

import csv
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from cotenant.cli.progress import say_compiling_serving
from cotenant.core.errors import InputError
from cotenant.core.files import atomic_file, check_writable
from cotenant.core.serving import Service
from cotenant.policy.serving.packing.planners import Packer
from cotenant.policy.serving.packing.specs import Spec
from cotenant.policy.serving.packing.tables import Gpus
from cotenant.profiles.serving.latency_files import load_profile
from cotenant.serving.config.services import MAX_GPUS
from cotenant.workloads.requests.scenarios import PLAN_COLUMNS, generate, plan_rows, read_scenarios, write_scenarios

REFERENCE_GPU = "RTX2080Ti"
REPORT_COLUMNS = ("scenario", "outcome", "bound", "gpus_used", "decision_ms", "note")


def generate_set(like: str, out: str | None, as_json: bool) -> None:
    """Write a scenario set to a file or to standard output."""
    scenarios = generate(like)
    if out is None:
        if as_json:
            raise InputError("--json needs --out here", field="out")
        write_scenarios(scenarios, sys.stdout)
        return
    with atomic_file(out) as file:
        count = write_scenarios(scenarios, file)
    print(json.dumps({"scenarios": count, "out": out}) if as_json else f"{count} scenarios in {out}")


def plan_set(
    scenarios: str, profile: str | None, gpus: int, spec: Spec, time_limit_s: float, out: str | None,
    report: str | None, as_json: bool, repeats: int = 1,
) -> None:  # fmt: skip
    """Plan each scenario separately and count those for which a plan claims to meet the SLOs. The time of a decision is
    the shortest of `repeats`. It excludes the time to build the tables of a set of models, which happens once.
    """
    if repeats < 1:
        raise InputError(f"repeats must be at least 1, not {repeats}", field="repeats")
    if not 1 <= gpus <= MAX_GPUS:
        raise InputError(f"GPUs must be 1 to {MAX_GPUS}, not {gpus}", field="gpus")
    check_writable(out, report)
    sets = read_scenarios(scenarios)
    gpu_set = Gpus.uniform(load_profile(REFERENCE_GPU, profile), gpus)
    packers: dict[tuple[tuple[str, float], ...], Packer] = {}
    rows: list[tuple[Any, ...]] = []
    plans: list[tuple[Any, ...]] = []
    for name, tasks in sets.items():
        key = tuple((m, slo) for m, _, slo in tasks)
        rates = [rate for _, rate, _ in tasks]
        if key not in packers:
            try:
                packers[key] = _warm(Packer(spec, gpu_set, _services(tasks), time_limit_s=time_limit_s), rates)
            except InputError as error:
                raise InputError(f"scenario {name}: {error.message}", file=scenarios, field=error.field) from None
        took = math.inf
        for _ in range(repeats):
            began = time.perf_counter()
            plan = packers[key].plan(rates)
            took = min(took, (time.perf_counter() - began) * 1e3)
        outcome = "claimed" if plan.feasible else "infeasible" if plan.proven_infeasible else "undecided"
        bound = "" if plan.bound is None else f"{plan.bound:.6g}"
        used = plan.gpus_used if plan.feasible else ""
        rows.append((name, outcome, bound, used, f"{took:.4f}", "; ".join(plan.notes)))
        if plan.feasible:
            plans += plan_rows(name, plan)
    for path, columns, content in ((out, PLAN_COLUMNS, plans), (report, REPORT_COLUMNS, rows)):
        if path is not None:
            _write_csv(path, columns, content)
    times = [float(r[4]) for r in rows]
    claimed = sum(r[1] == "claimed" for r in rows)
    summary = {
        "planner": spec.name,
        "scenarios": len(rows),
        "claimed": claimed,
        "infeasible": len(rows) - claimed,
        "proven_infeasible": sum(r[1] == "infeasible" for r in rows),
        "gpus_used": sum(r[3] for r in rows if r[1] == "claimed"),
        "decision_ms": {"median": statistics.median(times), "max": max(times)},
    }
    if as_json:
        print(json.dumps(summary))
        return
    ms = summary["decision_ms"]
    assert isinstance(ms, dict)
    print(
        f"{spec.name}: {claimed} of {len(rows)} scenarios planned, {summary['proven_infeasible']} "
        f"proven infeasible, {summary['gpus_used']} GPUs used; {ms['median']:.3f} ms per decision "
        f"(maximum {ms['max']:.2f})"
    )


def _warm(packer: Packer, rates: list[float]) -> Packer:
    """Return a planner whose tables are built and whose code is compiled, so that neither is timed."""
    say_compiling_serving()
    packer.plan(rates)
    return packer


def _services(tasks: list[tuple[str, float, float]]) -> list[Service]:
    return [Service(m, m, rate, slo) for m, rate, slo in tasks]


def _write_csv(path: str | Path, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    with atomic_file(path) as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(columns)
        out.writerows(rows)
