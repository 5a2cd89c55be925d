"""Generates synthetic job traces: arrivals, durations, GPU counts and models, drawn from a seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cotenant.core.errors import InputError, unknown_name
from cotenant.core.work import Floats, Jobs, Names, Trace
from cotenant.workloads.jobs.draws import (
    check_rate,
    draw_choice,
    parse_arrivals,
    parse_durations,
    parse_gpu_mix,
    round_ms,
    stream,
)
from cotenant.workloads.jobs.presets import PRESETS, Preset
from cotenant.workloads.jobs.registry import read_trace
from cotenant.workloads.jobs.select import durations_in
from cotenant.workloads.jobs.split import assign_models
from cotenant.workloads.trace_options import DEFAULT_SEED, DEFAULT_SPLIT

MAX_JOBS = 100_000_000
MAX_LOAD = 10.0  # a larger number is a percentage without its sign


@dataclass(frozen=True)
class Workload:
    """Options of `cotenant trace generate`. Texts are as the user wrote them; for an empty one, the value of the preset
    `like` applies.

    `load`: offered GPU time as a fraction of the capacity of `cluster_gpus` GPUs. It determines the arrival rate.
    """

    jobs: int
    like: str = "synergy"
    rate_per_s: float | None = None
    load: float | None = None
    cluster_gpus: int | None = None
    arrivals: str = ""
    durations: str = ""
    gpu_mix: str = ""
    split: str = ""
    split_mode: str = "overall"
    seed: int = DEFAULT_SEED


@dataclass(frozen=True)
class Generated:
    """A generated trace, the rate of its arrivals (NaN: the trace has no rate), and the resolved options by their
    command-line names (`plan`)."""

    trace: Trace
    rate_per_s: float
    plan: dict[str, Any]

    def summary(self, cluster_gpus: int | None = None) -> dict[str, Any]:
        """Return the options with which the trace was generated, and totals of the trace. `offered_load`: offered GPU
        time per second / `cluster_gpus`, at the requested rate; `drawn_load`: the same over the time until the last of
        the arrivals that were drawn.
        """
        jobs = self.trace.jobs
        gpu_s = float((jobs.gpus * jobs.duration_s).sum())
        rate = None if math.isnan(self.rate_per_s) else self.rate_per_s
        content = {
            **self.plan,
            "rate_per_h": None if rate is None else rate * 3600,
            "span_s": float(jobs.arrival_s[-1]),
            "gpu_hours": gpu_s / 3600,
        }
        if cluster_gpus and rate is not None:
            content["offered_load"] = gpu_s / len(jobs) * rate / cluster_gpus
            if jobs.arrival_s[-1] > 0:
                content["drawn_load"] = gpu_s / float(jobs.arrival_s[-1]) / cluster_gpus
        return content


def generate(
    workload: Workload,
    classes: Mapping[str, Sequence[str]],
    iteration_s: Mapping[str, float] | None = None,
) -> Generated:
    """Generate a trace. The same workload gives the same jobs. Arrivals, durations, GPU counts, models and tenants each
    have their own random stream of the seed.

    `classes`: the models of each class (image, language, speech), from which jobs get theirs by `workload.split`.
    `iteration_s`: seconds per iteration by model, for durations from a trace that states only iterations.
    """
    preset = _check(workload)
    n, seed = workload.jobs, workload.seed
    gpus = draw_choice(stream(seed, "gpus"), n, *parse_gpu_mix(workload.gpu_mix or preset.gpu_mix))
    duration_s = round_ms(_durations(workload, preset, gpus, iteration_s), "durations")
    rate = _rate(workload, preset, float(np.mean(gpus * duration_s)))
    arrivals = workload.arrivals or preset.arrivals
    draw = parse_arrivals(arrivals, lambda spec: read_trace(spec).require_jobs().jobs.arrival_s)
    arrival_s = round_ms(draw(stream(seed, "arrivals"), n, rate), "arrivals")
    weighted = bool(preset.models) and not workload.split
    split = workload.split or DEFAULT_SPLIT
    model = (
        _weighted(seed, "models", n, preset.models)
        if weighted
        else assign_models(n, split, classes, mode=workload.split_mode, seed=seed)
    )
    cpus, memory_bytes = _asks(preset, model, gpus)
    jobs = Jobs.build(
        n,
        id=[str(k) for k in range(n)],
        arrival_s=arrival_s,
        gpus=gpus,
        duration_s=duration_s,
        model=model,
        tenant=_weighted(seed, "tenants", n, preset.tenants) if preset.tenants else None,
        cpus=cpus,
        memory_bytes=memory_bytes,
    )
    plan = {
        "jobs": n,
        "like": workload.like,
        "arrivals": arrivals,
        "durations": workload.durations or preset.durations or f"as {workload.like}",
        "gpu-mix": workload.gpu_mix or preset.gpu_mix,
        "split": f"as {workload.like}" if weighted else split,
        "seed": seed,
    }
    return Generated(Trace(jobs, f"generated (seed {seed})", seed=seed), rate, plan)


def _check(workload: Workload) -> Preset:
    if not 1 <= workload.jobs <= MAX_JOBS:
        raise InputError(f"{workload.jobs:,} jobs is not between 1 and {MAX_JOBS:,}", field="jobs")
    if workload.like not in PRESETS:
        raise unknown_name("preset", workload.like, PRESETS, "like")
    preset = PRESETS[workload.like]
    if workload.rate_per_s is not None and workload.load is not None:
        raise InputError("give --rate or --load, not both: the load sets the rate", field="load")
    if (workload.arrivals or preset.arrivals) == "static" and (workload.rate_per_s or workload.load):
        raise InputError("static arrivals have no rate; leave --rate and --load out", field="arrivals")
    if workload.rate_per_s is not None:
        check_rate(workload.rate_per_s)
    if workload.load is not None and not 0 < workload.load <= MAX_LOAD:
        what = f"a load of {workload.load:g} is not above 0 and at most {MAX_LOAD:g} (0.9 is 90 %)"
        raise InputError(what, field="load")
    if workload.load is not None and not workload.cluster_gpus:
        raise InputError("--load is a fraction of a cluster; add --cluster, such as --cluster 16x8", field="load")
    return preset


def _durations(workload: Workload, preset: Preset, gpus: Floats, iteration_s: Mapping[str, float] | None) -> Floats:
    rng = stream(workload.seed, "durations")
    text = workload.durations or preset.durations
    if text:
        return parse_durations(text, lambda spec: durations_in(spec, iteration_s))(rng, len(gpus))
    return preset.draw_durations(rng, gpus)


def _asks(preset: Preset, models: Names, gpus: Floats) -> tuple[Floats | None, Floats | None]:
    """Return the CPU cores and bytes of memory that each job can use at most; None if the jobs' profiles determine
    them, not the preset.
    """
    if not preset.asks_per_gpu:
        return None, None
    rows = np.array([preset.asks_per_gpu.get(model, (np.nan, np.nan)) for model in models.tolist()])
    return rows[:, 0] * gpus, rows[:, 1] * gpus * 1e9


def _rate(workload: Workload, preset: Preset, gpu_s_per_job: float) -> float:
    """Return the rate of arrivals in jobs per second: the given rate; or the rate for the given load (rate x mean
    GPU-seconds of a job = load x GPUs); or the preset's. NaN for static arrivals, and for those of a trace.
    """
    if workload.rate_per_s is not None:
        return workload.rate_per_s
    if workload.load is not None and workload.cluster_gpus:
        return workload.load * workload.cluster_gpus / gpu_s_per_job
    if workload.arrivals.startswith("trace:") or workload.arrivals == "static":
        return math.nan
    return preset.rate_per_s


def _weighted(seed: int, part: str, n: int, weights: Mapping[str, float]) -> Names:
    names = np.array(list(weights), dtype=object)
    shares = np.array(list(weights.values()), dtype=np.float64)
    index = draw_choice(stream(seed, part), n, np.arange(len(names), dtype=np.float64), shares / shares.sum())
    chosen: Names = names[index.astype(np.int64)]
    return chosen
