"""Finds how many language models fit on one GPU, and then how many GPUs all models need. For the former, one GPU is
simulated with the first model, with the first two, and so on; each simulation has the trace's requests to its models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from cotenant.core.errors import InputError
from cotenant.sim.llm.engine import LlmSetup, simulate
from cotenant.workloads.llm.trace import TokenTrace

MISSES = 2  # models are added one at a time until the target has been missed this many times in a row


@dataclass(frozen=True)
class Row:
    """The result of one simulation with a number of models on a GPU. `least`: the lowest SLO attainment of a
    latency-sensitive model, `least_of` its name. A best-effort model has no target, but counts as 0 if none of its
    requests is answered, because it is not served then. `attainment`: that of all requests, `best_effort` that of the
    requests to best-effort models, None without any.
    """

    models: int
    gpus: int
    attainment: float
    least: float
    least_of: str
    ttft_p99_ms: float
    tpot_p99_ms: float | None
    busy: float
    switches: int
    best_effort: float | None


@dataclass(frozen=True)
class Packing:
    """The result of the search for how many models fit on a GPU. `per_gpu`: one GPU serves the setup's first `per_gpu`
    models at the target; `gpus`: number of GPUs for all models, None if more are needed than were tried.
    """

    target: float
    per_gpu: int
    gpus: int | None
    rows: tuple[Row, ...]

    def content(self) -> dict[str, Any]:
        """As JSON."""
        rows = [asdict(row) for row in self.rows]
        return {"target": self.target, "per_gpu": self.per_gpu, "gpus": self.gpus, "rows": rows}


def pack(
    trace: TokenTrace, setup: LlmSetup, target: float, most_gpus: int, tell: Callable[[Row], None] | None = None
) -> Packing:
    """Find how many models one GPU serves, and how many GPUs all models need, by simulating `trace`, which must have
    requests to all models of the setup. All GPUs are alike.
    """
    rows: list[Row] = []

    def attempt(models: int, gpus: int) -> Row:
        rows.append(_row(trace, setup, models, gpus))
        if tell is not None:
            tell(rows[-1])
        return rows[-1]

    whole, per_gpu, missed = len(setup.models), 0, 0
    for models in range(1, whole + 1):
        missed = 0 if attempt(models, 1).least >= target else missed + 1
        per_gpu = per_gpu if missed else models
        if missed == MISSES:
            break
    if per_gpu == whole:
        return Packing(target, per_gpu, 1, tuple(rows))
    # the loop ends at the number of models, because more GPUs would not be used
    for gpus in range(2, min(most_gpus, whole) + 1):
        if attempt(whole, gpus).least >= target:
            return Packing(target, per_gpu, gpus, tuple(rows))
    return Packing(target, per_gpu, None, tuple(rows))


def _row(trace: TokenTrace, setup: LlmSetup, models: int, gpus: int) -> Row:
    chosen = setup.models[:models]
    part = replace(trace.keep(trace.model < models), models=tuple(m.facts.name for m in chosen))
    if not len(part):
        raise InputError(f"{chosen[0].facts.name} has no requests; the first model of the file must have some")
    weights = [replace(m, weight=1.0 / models) for m in chosen] if setup.sharing == "fixed" else chosen
    found = simulate(part, replace(setup, models=tuple(weights), gpu_bytes=setup.gpu_bytes[:1] * gpus))
    content = found.summary()
    promised = {}
    for model in chosen:
        of = content["models"][model.facts.name]
        if of["requests"] and not (model.facts.best_effort and of["answered"]):
            promised[model.facts.name] = of["attainment"]
    name = min(promised, key=promised.__getitem__, default="")
    total = content["total"]
    busy = float(np.mean([g["busy"] for g in content["gpus"]]))
    ttft = total["ttft_ms"]["p99"] if total["ttft_ms"] else float("inf")
    tpot = total["tpot_ms"]["p99"] if total["tpot_ms"] else None
    return Row(
        models, gpus, total["attainment"], promised.get(name, 1.0), name, ttft, tpot, busy, content["switches"],
        _attainment(content, [m.facts.name for m in chosen if m.facts.best_effort]),
    )  # fmt: skip


def _attainment(content: dict[str, Any], names: list[str]) -> float | None:
    """Return the fraction in time of the requests to these models together, None if they have none."""
    rows = [row for row in (content["models"][name] for name in names) if row["requests"]]
    sent = sum(row["requests"] for row in rows)
    return sum(row["attainment"] * row["requests"] for row in rows) / sent if sent else None
