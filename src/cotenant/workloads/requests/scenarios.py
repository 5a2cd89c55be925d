"""CSV files of planning scenarios (models with rates and SLOs) and of plans for them.

Scenarios: scenario,model,rate_rps,slo_ms. Plans: scenario,gpu,partition_pct,slot,model,batch,duty_ms.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from cotenant.core.errors import InputError, unknown_name
from cotenant.core.serving import ServingPlan
from cotenant.core.textfile import cell_number, csv_columns

Row = tuple[str, float, float]  # model, rate_rps, slo_ms
SCENARIO_COLUMNS = ("scenario", "model", "rate_rps", "slo_ms")
PLAN_COLUMNS = ("scenario", "gpu", "partition_pct", "slot", "model", "batch", "duty_ms")

# SLOs of the models in the gpulet paper: twice the latency of a batch of 32 that runs alone on a GPU
SLO_MS = {
    "lenet1": 5.0, "googlenet": 66.0, "resnet50": 108.0, "ssd-mobilenetv1": 202.0, "vgg16": 142.0, "mnasnet1_0": 62.0,
    "mobilenet_v2": 64.0, "densenet161": 202.0, "bert": 22.0,
}  # fmt: skip
_FIVE = ("lenet1", "googlenet", "resnet50", "ssd-mobilenetv1", "vgg16")
_LADDERS = {  # name of a mix -> requests/s of each of its models at step 1
    "equal": dict.fromkeys(_FIVE, 10.0),
    "scen1": {"googlenet": 100.0, "bert": 100.0, "mnasnet1_0": 50.0, "mobilenet_v2": 50.0},
    "scen2": {"densenet161": 10.0, "vgg16": 10.0},
    "scen3": {"resnet50": 10.0, "vgg16": 10.0, "mobilenet_v2": 10.0},
    "scen4": {"ssd-mobilenetv1": 10.0, "mnasnet1_0": 10.0, "densenet161": 10.0},
    "scen5": {"lenet1": 10.0, "ssd-mobilenetv1": 10.0, "vgg16": 10.0, "mnasnet1_0": 10.0},
}
LADDER_STEPS = 160
SETS = ("gpulet-1023", "gpulet-19682", "ladder")


def generate(like: str) -> Iterator[tuple[str, list[Row]]]:
    """Produce the scenarios of a public set (one of SETS), without randomness."""
    if like == "gpulet-1023":
        yield from _combinations(_FIVE, (0.0, 200.0, 400.0, 600.0), 4)
    elif like == "gpulet-19682":
        yield from _combinations(tuple(SLO_MS), (0.0, 100.0, 200.0), 5)
    elif like == "ladder":
        for name, mix in _LADDERS.items():
            for step in range(1, LADDER_STEPS + 1):
                yield f"{name}-{step:03d}", [(m, rate * step, SLO_MS[m]) for m, rate in mix.items()]
    else:
        raise unknown_name("scenario set", like, SETS, "like")


def _combinations(models: tuple[str, ...], rates: tuple[float, ...], digits: int) -> Iterator[tuple[str, list[Row]]]:
    """Produce every combination of the models' rates, except all 0. The last model's rate changes fastest."""
    for number, combo in enumerate(itertools.product(rates, repeat=len(models))):
        if number:
            rows = [(m, r, SLO_MS[m]) for m, r in zip(models, combo, strict=True) if r]
            yield f"combo-{number:0{digits}d}", rows


def write_scenarios(scenarios: Iterable[tuple[str, list[Row]]], file: IO[str]) -> int:
    """Write scenarios as CSV. Returns the number of scenarios."""
    out = csv.writer(file, lineterminator="\n")
    out.writerow(SCENARIO_COLUMNS)
    count = 0
    for name, rows in scenarios:
        count += 1
        out.writerows((name, m, f"{rate:g}", f"{slo:g}") for m, rate, slo in rows)
    return count


def read_scenarios(path: str | Path) -> dict[str, list[Row]]:
    """Read scenarios in file order. InputError with the line for a rate or SLO that is not positive and finite."""
    found: dict[str, list[Row]] = {}
    for line, row in csv_columns(path, SCENARIO_COLUMNS):
        rate, slo = (cell_number(row[c], path, line, c, above=0) for c in ("rate_rps", "slo_ms"))
        if not row["scenario"] or not row["model"]:
            raise InputError("scenario and model must not be empty", file=path, line=line)
        rows = found.setdefault(row["scenario"], [])
        if any(m == row["model"] for m, _, _ in rows):
            raise InputError(f"{row['model']} appears twice in {row['scenario']}", file=path, line=line)
        rows.append((row["model"], rate, slo))
    if not found:
        raise InputError("has no scenarios", file=path)
    return found


def plan_rows(scenario: str, plan: ServingPlan) -> Iterator[tuple[object, ...]]:
    """Produce a serving plan as rows of PLAN_COLUMNS. The duty cycle has full precision, because rounding could violate
    an SLO.
    """
    for let in plan.gpulets:
        percent = f"{let.percent:g}"
        for seat in let.seats:
            yield scenario, let.gpu, percent, let.slot, seat.model, seat.batch, repr(let.duty_ms)
