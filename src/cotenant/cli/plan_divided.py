"""`cotenant plan MODELS.yaml --divide GPU`: parts of GPUs for language models."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cotenant.cli.fitting import plain_table, print_whole
from cotenant.cli.llm_setup import times_content, times_sentence
from cotenant.core.errors import InputError, WorkError
from cotenant.core.gpus import find_gpu
from cotenant.core.units import counted

if TYPE_CHECKING:
    from cotenant.cli.llm_setup import GpuMemory
    from cotenant.core.gpus import Gpu
    from cotenant.profiles.llm.partitions import Engine
    from cotenant.profiles.llm.profile import StepTimes
    from cotenant.serving.config.models import ModelsConfig
    from cotenant.sim.llm.divided import DividedPlan
    from cotenant.sim.llm.engine import LlmSetup, SimModel
    from cotenant.workloads.llm.trace import TokenTrace

HEADROOM = 1.1  # factor on the rates in the first plan, before simulated requests show what each model needs


def plan_parts(
    config: ModelsConfig, setup: LlmSetup, memory: GpuMemory, specs: Sequence[str], gpu: str, trace: TokenTrace,
    target: float, most_gpus: int, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Plan language models on parts of GPUs, verify the plan by simulation, and print it."""
    from cotenant.cli.progress import say_compiling_serving
    from cotenant.profiles.llm.partitions import divided
    from cotenant.sim.llm.divided import plan_divided

    base = divided(gpu, config.raw.gpus.memory)
    measured = _measured(specs, find_gpu(gpu))
    engines = [_engine(model, measured, trace, i) for i, model in enumerate(setup.models)]
    say_compiling_serving()
    found = plan_divided(engines, base, most_gpus, HEADROOM, target, trace, seed)
    content = _content(found, engines, target)
    if as_json:
        print(json.dumps(content | memory.content() | times_content(setup) | {"seed": seed}))
    else:
        _show(content)
        print(memory.sentence())
        print(times_sentence(setup, memory))
        for reason, count in trace.left_out.items():
            print(f"note: {counted(count, 'request')} left out: {reason}", file=sys.stderr)
    left = [x["model"] for x in content["left_out"]]
    if left:
        of = f"{len(left)} of {len(engines)} models"
        gpus = "1 GPU does" if most_gpus == 1 else f"{most_gpus} GPUs do"
        raise WorkError(f"{gpus} not serve all requests of {of}: {', '.join(left)}")
    if not content["holds"]:
        raise WorkError(
            f"in simulation some models have less than {target:.1%} of their requests in time; allow more GPUs or "
            "relax their SLOs"
        )


def _measured(specs: Sequence[str], card: Gpu) -> dict[str, dict[str, StepTimes]]:
    """Return the rows MODEL@PARTITION of the profile files: step times by model and partition. Those of parts of
    another GPU model are left out, since equal names do not make equal parts: they are estimated from the whole GPU."""
    from cotenant.profiles.llm.files import read_profiles
    from cotenant.profiles.llm.profile import parse_size

    found: dict[str, dict[str, StepTimes]] = {}
    for path in dict.fromkeys(text.rpartition("=")[2] for text in specs):
        for name, row in {} if parse_size(path) is not None else read_profiles(path).items():
            model, at, part = name.partition("@")
            if at and row.card in (None, card):
                found.setdefault(model, {})[part] = row.times
    return found


def _engine(model: SimModel, measured: dict[str, dict[str, StepTimes]], trace: TokenTrace, index: int) -> Engine:
    from cotenant.profiles.llm.partitions import Engine
    from cotenant.sim.llm.divided import traffic_of

    facts, name = model.facts, model.facts.name
    if not (trace.model == index).any():
        raise InputError(f"model {name} has no requests", field="trace")
    return Engine(
        name, model.profile, facts.memory_bytes, model.target.ttft_ms or 1e12, model.target.tpot_ms or 1e12,
        traffic_of(trace, index, max(trace.span_s, 1e-9)), facts.priority, not facts.best_effort,
        measured.get(name, {}),
    )  # fmt: skip


def _content(found: DividedPlan, engines: Sequence[Engine], target: float) -> dict[str, Any]:
    """Return the plan with rates in requests per second."""
    from cotenant.cli.plan_view import layouts

    plan = found.plan
    capacity, tokens = plan.capacities(), {e.name: e.traffic.decodes for e in engines}
    lets = []
    for let in plan.gpulets:
        part = found.profile.partition(let.partition)
        work = {s.service: found.profile.latency_ms(s.model, s.batch, let.partition) for s in let.seats}
        total = sum(work.values())
        lets.append({
            "gpu": let.gpu, "partition": let.partition, "instance": let.instance if part.slots else None,
            "cycle_ms": let.duty_ms,
            "models": [
                {"model": s.service, "sequences": s.batch, "time": work[s.service] / total,
                 "capacity_rps": let.capacity_rps(s) / tokens[s.service]}
                for s in let.seats
            ],
        })  # fmt: skip
    judged = [e.name for e in engines if e.latency_sensitive]
    return {
        "gpu": found.profile.gpu, "gpus": plan.gpus_used, "feasible": plan.feasible, "target": target,
        "holds": found.holds(target, judged), "layouts": layouts(plan, {found.profile.gpu: found.profile}),
        "parts": lets,
        "models": {
            e.name: {
                "rate_rps": e.traffic.rate_rps, "capacity_rps": capacity.get(e.name, 0.0) / e.traffic.decodes,
                "planned_for": found.factors[e.name], "attainment": found.attainment.get(e.name),
                "ttft_ms": e.ttft_ms, "tpot_ms": e.tpot_ms,
            }
            for e in engines
        },
        "left_out": [
            {"model": x.service, "missing_rps": x.missing_rps / tokens[x.service], "reason": x.reason}
            for x in plan.left_out
        ],
    }  # fmt: skip


def _show(content: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    heads = ("GPU", "part", "model", "requests at once", "time", "cycle")
    table = plain_table(f"{counted(content['gpus'], 'GPU')} {content['gpu']}", heads, left=("part", "model"))
    for let in content["parts"]:
        for row in let["models"]:
            part = let["partition"] if let["instance"] is None else f"{let['partition']}@{let['instance']}"
            cycle = f"{let['cycle_ms']:.1f} ms"
            table.add_row(str(let["gpu"]), part, row["model"], str(row["sequences"]), f"{row['time']:.0%}", cycle)
    print_whole(table)
    print_whole(_models_table(content["models"]))
    for gpu, layout in content["layouts"].items():
        console.print(f"MIG layout of GPU {gpu}: {layout}")
    for left in content["left_out"]:
        console.print(f"not planned: {left['missing_rps']:.2f} requests/s for {left['model']}: {left['reason']}")


def _models_table(models: dict[str, Any]) -> Any:
    heads = ("model", "actual rate/s", "capacity/s", "TTFT SLO", "TPOT SLO", "in time (simulated)")
    table = plain_table(None, heads, left=("model",))
    for name, row in models.items():
        reached = row["attainment"]
        table.add_row(
            name, f"{row['rate_rps']:.3g}", f"{row['capacity_rps']:.3g}", f"{row['ttft_ms']:g} ms",
            f"{row['tpot_ms']:g} ms", "-" if reached is None else f"{reached:.2%}",
        )  # fmt: skip
    return table
