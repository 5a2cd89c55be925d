"""Prints the result of `cotenant plan`: one JSON object, or tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cotenant.cli.fitting import plain_table, print_whole
from cotenant.core.serving import ServingPlan
from cotenant.core.units import counted
from cotenant.policy.serving.packing.replan import disruption, moves
from cotenant.profiles.serving.latency import ServingProfile
from cotenant.serving.config.planning import Problem
from cotenant.serving.planning.decide import Decision


def content(found: Decision, problem: Problem, old: ServingPlan | None) -> dict[str, Any]:
    """Return the plan with rates and headroom, how it was verified, and the moves from an older plan."""
    plan, verified = found.plan, found.verified
    out = plan.to_dict()
    capacity = plan.capacities()
    for service in problem.services:
        row = out["services"][service.name]
        row["planned_rps"] = row["rate_rps"]
        row["rate_rps"] = service.rate_rps
        row["headroom"] = capacity.get(service.name, 0.0) / service.rate_rps
        row["slo_ms"] = service.slo_ms
        if verified is not None:
            row["simulated_attainment"] = verified.attainment.get(service.name)
    out["decision_ms"] = found.decision_ms
    out["verified"] = None
    if verified is not None and found.target is not None:
        out["verified"] = {
            "target": found.target, "holds": verified.holds(found.target), "rounds": verified.rounds,
        }  # fmt: skip
    out["layouts"] = layouts(plan, problem.profiles)
    if old is not None:
        steps = moves(old, plan)
        out["moves"] = [vars(step) for step in steps]
        out["disruption"] = disruption(steps)
    return out


def layouts(plan: ServingPlan, profiles: Mapping[str, ServingProfile]) -> dict[str, str]:
    """Return the MIG layout of each GPU that has one, in the notation of `cotenant mig apply`: GPU -> kind@start,..."""
    found: dict[int, set[tuple[int, str]]] = {}
    for let in plan.gpulets:
        kind = profiles[let.gpu_model].partition(let.partition).instance
        if kind:
            found.setdefault(let.gpu, set()).add((let.instance, kind))
    return {str(gpu): ",".join(f"{kind}@{start}" for start, kind in sorted(x)) for gpu, x in found.items()}


def show(data: dict[str, Any]) -> None:
    """Print the tables of a serving plan."""
    from rich.console import Console

    console = Console(soft_wrap=True)
    title = f"{data['planner']}: {data['gpus_used']} of {counted(data['gpus'], 'GPU')}"
    table = plain_table(title, ("GPU", "gpulet", "service", "batch", "duty"), left=("gpulet", "service"))
    for let in data["gpulets"]:
        for seat in let["seats"]:
            table.add_row(
                str(let["gpu"]), let["partition"], seat["service"], str(seat["batch"]), f"{let['duty_ms']:.1f} ms"
            )
    print_whole(table)
    if not console.is_terminal:  # an empty line separates the tables in a file as it does on a terminal
        console.print()
    print_whole(_services_table(data))
    for gpu, layout in data["layouts"].items():
        console.print(f"MIG layout of GPU {gpu}: {layout}", highlight=False)
    for left in data["left_out"]:
        row = data["services"][left["service"]]
        asked, own = row["planned_rps"], row["rate_rps"]
        factor = f" ({own:,.12g} with a headroom of {asked / own:.3g})" if own and abs(asked / own - 1) > 1e-9 else ""
        console.print(
            f"not planned: {left['missing_rps']:,.1f} of the {asked:,.1f} requests/s{factor} for {left['service']}:"
            f" {left['reason']}",
            highlight=False,
        )
    for note in data["notes"]:
        console.print(note)
    for step in data.get("moves", ()):
        what = f" {step['service']}" if step["service"] else ""
        console.print(f"move: {step['kind']}{what} on GPU {step['gpu']} {step['partition']}")


def _services_table(data: dict[str, Any]) -> Any:
    heads = ("service", "rate/s", "capacity/s", "headroom", "SLO", "in time (simulated)")
    table = plain_table(None, heads, left=("service",))
    for name, row in data["services"].items():
        simulated = row.get("simulated_attainment")
        table.add_row(
            name, f"{row['rate_rps']:g}", f"{row['capacity_rps']:.0f}", f"x{row['headroom']:.2f}",
            f"{row['slo_ms']:.4g} ms", "-" if simulated is None else f"{simulated:.2%}",
        )  # fmt: skip
    return table
