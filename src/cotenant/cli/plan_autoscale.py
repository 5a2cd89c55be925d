"""`cotenant plan --autoscale RATES.csv`: the number of GPUs over time for changing rates."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from cotenant.cli.progress import say_compiling_serving
from cotenant.core.errors import InputError, WorkError, unknown_name
from cotenant.core.extras import needs
from cotenant.core.textfile import cell_number, csv_columns
from cotenant.core.units import counted, parse_seconds
from cotenant.policy.serving.autoscale import FORECASTS, Autoscaler
from cotenant.policy.serving.packing.replan import Sizer
from cotenant.policy.serving.packing.specs import Spec
from cotenant.serving.config.planning import Problem

with needs("plan"):
    import numpy as np

LEAST_RATE = 0.01  # an idle service is planned for this rate in requests/s, so that it stays reachable


def read_rates(path: str | Path, names: list[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Read measured request rates from CSV: times in s, ascending and equally spaced, and requests/s by service."""
    lines = list(csv_columns(path, ("time_s",)))
    columns = tuple(lines[0][1]) if lines else ()
    unknown = [c for c in columns if c not in ("time_s", *names)]
    if unknown or len(columns) == 1:
        what = f"column {unknown[0]} is not a service" if unknown else "needs a column for each service beside time_s"
        raise InputError(f"{what}; services are {', '.join(names)}", file=path, line=1)
    if len(lines) < 2:
        raise InputError("needs two rows or more", file=path)
    rows = [[cell_number(row[c], path, line, c, least=0) for c in columns] for line, row in lines]
    table = dict(zip(columns, np.array(rows).T, strict=True))
    times = table.pop("time_s")
    steps = np.diff(times)
    if (steps <= 0).any() or not np.allclose(steps, steps[0], rtol=1e-3):
        raise InputError("times must increase in equal steps", file=path, field="time_s")
    return times, table


def decisions(
    problem: Problem, spec: Spec, times: np.ndarray, rates: dict[str, np.ndarray], forecast: str, patience: int,
    period_s: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """Decide the number of GPUs for each period. One row per decision: the forecast, the GPUs needed for it, the GPUs
    held, and the GPUs that the next period needed.
    """
    services = problem.services
    step = float(times[1] - times[0])
    ahead = max(1, round(period_s / step))
    tracked = {name: FORECASTS[forecast]() for name in rates}
    sizer = Sizer(spec, problem.gpus, services)
    scaler = Autoscaler(most=len(problem.gpus), patience=patience)

    def needed(wanted: dict[str, float]) -> int | None:
        plan = sizer.fewest([max(LEAST_RATE, wanted.get(s.name, s.rate_rps)) for s in services])
        return plan.gpus_used if plan.feasible else None

    held, out = 1, []
    for start in range(0, len(times) - ahead, ahead):
        for name, series in rates.items():
            for rate in series[start : start + ahead]:
                tracked[name].observe(float(rate))
        expected = {name: tracked[name].forecast(ahead) for name in rates}
        wish = needed(expected)
        held = scaler.decide(held, lambda wish=wish: wish)  # type: ignore[misc]
        came = {name: float(series[start + ahead : start + 2 * ahead].mean()) for name, series in rates.items()}
        actual = needed(came)
        out.append(
            {
                "time_s": float(times[start + ahead]), "forecast_rps": expected, "wanted": wish, "held": held,
                "came_rps": came, "needed": actual, "short": actual is None or actual > held,
            }
        )  # fmt: skip
    return out


def replay(problem: Problem, spec: Spec, path: str, forecast: str, patience: int, period: str, as_json: bool) -> None:
    """Print the decisions on the number of GPUs for a file of measured rates."""
    if forecast not in FORECASTS:
        raise unknown_name("forecast", forecast, FORECASTS, "forecast")
    if patience < 1:
        raise InputError("patience must be at least 1", field="patience")
    period_s = parse_seconds(period, field="period")
    if period_s <= 0:
        raise InputError(f"a period must be above 0 s, not {period!r}", field="period")
    times, rates = read_rates(path, [s.name for s in problem.services])
    if period_s < times[1] - times[0] or len(times) * (times[1] - times[0]) < 2 * period_s:
        raise InputError(
            "the rates must cover at least two periods, in steps no longer than one period", file=path, field="period"
        )
    say_compiling_serving()
    rows = decisions(problem, spec, times, rates, forecast, patience, period_s)
    content = {
        "forecast": forecast,
        "period_s": period_s,
        "gpu_seconds": sum(r["held"] for r in rows) * period_s,
        "gpu_seconds_needed": sum(r["needed"] or len(problem.gpus) for r in rows) * period_s,
        "changes": sum(a["held"] != b["held"] for a, b in itertools.pairwise(rows)),
        "short_periods": sum(r["short"] for r in rows),
        "decisions": rows,
    }
    if as_json:
        print(json.dumps(content))
    else:
        _show(content)
    lacking = sum(r["needed"] is None for r in rows)
    if lacking:
        raise WorkError(
            f"in {counted(lacking, 'period')} of {len(rows):,} the services needed more than all "
            f"{counted(len(problem.gpus), 'GPU')}"
        )


def _show(content: dict[str, Any]) -> None:
    from cotenant.cli.fitting import plain_table, print_whole

    rows = content["decisions"]
    changes = counted(content["changes"], "change")
    short = f"too few GPUs held in {content['short_periods']:,} of {counted(len(rows), 'period')}"
    heads = ("time", "forecast/s", "came/s", "GPUs held", "needed")
    table = plain_table(f"{content['forecast']}: {changes}, {short}", heads)
    for row in rows:
        table.add_row(
            f"{row['time_s']:g} s", f"{sum(row['forecast_rps'].values()):.0f}", f"{sum(row['came_rps'].values()):.0f}",
            str(row["held"]), "-" if row["needed"] is None else str(row["needed"]),
        )  # fmt: skip
    print_whole(table)
