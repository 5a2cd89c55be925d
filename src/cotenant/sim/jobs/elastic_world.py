"""Builds the tables of an elastic run from jobs, elastic profiles and a cluster.

A *base* is a kind of job: its model and the GPUs that it requests. A demand type says what a job needs. A waiting job
has the type of its base; a running job has a type for its base in one configuration (GPU model and number). A policy
decides by changing a job's type, so the simulator's compiled event loop (kernel.py) need not know about elasticity. For
job policies, the level of a job is its amount of CPU and memory; here it is the phase of the job's training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cotenant.core import work
from cotenant.core.cluster import Cluster, NodeGroup
from cotenant.core.errors import InputError, unknown_name
from cotenant.core.gpus import find_gpu
from cotenant.core.units import counted
from cotenant.policy.elastic.view import Configurations
from cotenant.policy.jobs.arrays import AMOUNT, TYPE, Array, Demand
from cotenant.policy.jobs.demand import build_nodes
from cotenant.profiles.training.elastic import ElasticModel, ElasticProfiles
from cotenant.workloads.jobs.presets import PRESETS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Tables of CPU and memory must have the levels PROPORTIONAL, IDEAL and DOWN (policy/jobs/arrays.py), even if the
# training has fewer phases: when the record of a run is written, level IDEAL is read.
LEAST_LEVELS = 3


@dataclass(frozen=True)
class Base:
    """Jobs of one kind (a base): their model, the GPUs that they request, and the GPU models that they accept."""

    model: ElasticModel
    wants: int
    accepts: str


@dataclass(frozen=True)
class ElasticTables:
    """The tables of a run under an elastic policy, with J jobs, B bases (kinds of job), C configurations, G GPU models
    and P phases of the training.

    Demand types: b for a waiting job of base b; B + b x C + c for a job of base b that runs in configuration c; and, if
    GPUs are shared, B + B x C + b x C + c for a job of base b on half of a GPU in configuration c. Levels: p for a job
    in phase p; p + P x (1 + b) for a job in phase p that shares its GPU with a job of base b.
    """

    demand: Demand
    nodes: Array
    options: Configurations
    models: tuple[str, ...]  #: GPU models, in the order of `options.gpu`
    bases: tuple[Base, ...]
    #: [B, P, C]: work per second of jobs of each base (kind of job), in each training phase and configuration
    rate: Floats
    base: Ints  #: [J]: base of each job
    total: Floats  #: [J]: work of each job
    restart_s: Floats  #: [J]: time of a restart of each job in s; NaN if the job's profile states none
    # [B, B, G]: fraction of its speed that a job of the first base (kind of job) keeps if it shares a GPU of a model
    # with a job of the second base; empty if GPUs are not shared
    beside: Floats

    def type_of(self, base: Ints, config: Ints, shared: NDArray[np.bool_]) -> Ints:
        """Return the demand type of jobs of these bases in these configurations; a configuration below 0: the job
        waits."""
        b, c = len(self.bases), len(self.options.gpu)
        return np.where(config < 0, base, b + base * c + config + np.where(shared, b * c, 0))


def build_tables(
    trace: work.Trace,
    profiles: ElasticProfiles,
    cluster: Cluster,
    *,
    rigid: bool,
    packs: bool = False,
    default_profile: str | None = None,
    trace_gpu: str | None = None,
) -> ElasticTables:
    """Build the tables of a run under an elastic policy. InputError names a job that has no profile or fits on no node.
    `rigid`: jobs run on exactly the GPUs that they request. `packs`: two jobs may share a GPU. `trace_gpu`: GPU model
    of the trace's durations (default, and for models that were not measured there: the cluster's first GPU model on
    which the job can run).
    """
    nodes, kinds = build_nodes(cluster)
    models = tuple(dict.fromkeys(group.gpu.name for group in kinds))
    options = _configurations(profiles, nodes, kinds, models)
    bases, base = _bases(trace, profiles, default_profile)
    rate = np.stack([_rates(b, profiles.phases, options, models) for b in bases])
    _check(trace, bases, base, rate, options, rigid)
    reference = np.array([_reference(b, rate[i, 0], options) for i, b in enumerate(bases)])
    # seconds per unit of work of each base in its reference configuration, averaged over the training's phases
    alone = (1.0 / rate[np.arange(len(bases)), :, reference]).mean(axis=1)
    pace = alone  # the same on the GPU to which the trace's durations refer
    if trace_gpu is not None:
        pace = np.array([_pace_on(b, find_gpu(trace_gpu, "trace-gpu").name) for b in bases])
        pace = np.where(np.isnan(pace), alone, pace)
    jobs = trace.jobs
    whole = np.array([b.model.work for b in bases])[base]
    total = np.where(np.isnan(jobs.duration_s), jobs.iterations, jobs.duration_s / pace[base])
    total = np.where(np.isnan(total), whole, total)
    if np.isnan(total).any():
        job = jobs.id[int(np.flatnonzero(np.isnan(total))[0])]
        what = f"job {job} has neither a duration nor iterations, and its profile does not state its work"
        raise trace.wrong(job, "iterations", what)
    beside = _beside(bases, profiles, models) if packs else np.zeros((0, 0, 0))
    demand = _demand(bases, rate, alone, options, models, kinds)
    if packs:
        demand = _with_halves(demand, rate, options, beside)
    restart_s = np.array([b.model.restart_s for b in bases])[base]
    return ElasticTables(demand, nodes, options, models, tuple(bases), rate, base, total, restart_s, beside)


def _configurations(
    profiles: ElasticProfiles, nodes: Array, kinds: list[NodeGroup], models: tuple[str, ...]
) -> Configurations:
    """Return every measured (GPU model, count) that fits into the cluster, ordered by model, then count."""
    model_of_kind = np.array([models.index(group.gpu.name) for group in kinds])
    capacity = np.bincount(model_of_kind[nodes["kind"]], weights=nodes["gpus"], minlength=len(models)).astype(np.int64)
    found = sorted(
        {
            (g, count)
            for model in profiles.models.values()
            for g, name in enumerate(models)
            for count in model.rate.get(name, {})
            if count <= capacity[g]
        }
    )
    if not found:
        measured = sorted({gpu for model in profiles.models.values() for gpu in model.rate})
        raise InputError(
            f"elastic profiles {profiles.name} know none of the cluster's GPU models ({', '.join(models)}); they know "
            f"{', '.join(measured)}; name one of them by --gpu or in a cluster file", field="cluster",
        )  # fmt: skip
    price = np.array([profiles.price.get(name, np.nan) for name in models])
    return Configurations(np.array([g for g, _ in found]), np.array([n for _, n in found]), capacity, price)


def _bases(trace: work.Trace, profiles: ElasticProfiles, default_profile: str | None) -> tuple[list[Base], Ints]:
    jobs = trace.jobs
    names = jobs.model.astype(str)
    known = np.isin(names, list(profiles.models))
    if default_profile is not None:
        if default_profile not in profiles.models:
            raise unknown_name("profile", default_profile, profiles.models, "default-profile")
        names = np.where(known, names, default_profile)
    elif not known.all():
        row, most = int(np.flatnonzero(~known)[0]), math.ceil(jobs.gpus.max())
        able = (name for name, model in profiles.models.items() if any(most in by for by in model.rate.values()))
        drawn = f"; cotenant trace generate --like {profiles.name} draws jobs with profiles"
        raise trace.wrong(
            jobs.id[row], "model",
            f"model {str(names[row])!r} of job {jobs.id[row]} has no elastic profile; known: "
            f"{', '.join(profiles.models)}; or give --default-profile NAME, such as "
            f"{next(able, next(iter(profiles.models)))!r}{drawn if profiles.name in PRESETS else ''}",
        )  # fmt: skip
    wants = np.maximum(np.ceil(jobs.gpus), 1).astype(np.int64)
    keys: dict[tuple[str, int, str], int] = {}
    base = np.array([
        keys.setdefault(key, len(keys))
        for key in zip(names.tolist(), wants.tolist(), jobs.gpu_models.tolist(), strict=True)
    ])  # fmt: skip
    return [Base(profiles.models[name], n, accepts) for name, n, accepts in keys], base


def _rates(base: Base, phases: int, options: Configurations, models: tuple[str, ...]) -> Floats:
    """Return the work per second in each phase and configuration [P, C]; 0 where it was not measured or the job does
    not accept the GPU model."""
    accepted = {find_gpu(name, "gpu_models").name for name in base.accepts.split("|") if name} or set(models)
    table = np.zeros((phases, len(options.gpu)))
    for c, (gpu, count) in enumerate(zip(options.gpu.tolist(), options.count.tolist(), strict=True)):
        if models[gpu] in accepted:
            table[:, c] = base.model.rate.get(models[gpu], {}).get(count, 0.0)
    return table


def _check(
    trace: work.Trace, bases: list[Base], base: Ints, rate: Floats, options: Configurations, rigid: bool
) -> None:
    for b, entry in enumerate(bases):
        may = rate[b, 0] > 0
        if rigid:
            may = may & (options.count == entry.wants)
        if may.any():
            continue
        job = trace.jobs.id[int(np.flatnonzero(base == b)[0])]
        sizes = sorted(set(options.count[rate[b, 0] > 0].tolist()))
        have = "on none of the cluster's GPU models"
        if sizes:
            have = f"on {', '.join(map(str, sizes))} {'GPU' if sizes == [1] else 'GPUs'}"
        asked = f"job {job} asks for {counted(int(entry.wants), 'GPU')}"
        raise trace.wrong(job, "gpus", f"{asked}; its model {entry.model.name!r} was measured {have}")


def _pace_on(base: Base, gpu: str) -> float:
    """Return the seconds per unit of work of a base on a GPU model, with the number of GPUs as in `_reference`. NaN
    if it was not measured there.
    """
    by = base.model.rate.get(gpu, {})
    if not by:
        return math.nan
    return float((1.0 / by[max((n for n in by if n <= base.wants), default=min(by))]).mean())


def _reference(base: Base, rate: Floats, options: Configurations) -> int:
    """Return the configuration to which the isolated time refers. Its GPU model is the cluster's first model with a
    measurement. Its number of GPUs is the one that the job requests; if that was not measured, the next smaller
    measured number; and if there is none, the smallest."""
    for gpu in range(len(options.capacity)):
        can = np.flatnonzero((options.gpu == gpu) & (rate > 0))
        if len(can):
            below = can[options.count[can] <= base.wants]
            return int(below[-1] if len(below) else can[0])
    raise AssertionError("unreachable: a base without a measured configuration passed the input checks")


def _demand(
    bases: list[Base], rate: Floats, alone: Floats, options: Configurations, models: tuple[str, ...],
    kinds: list[NodeGroup],
) -> Demand:  # fmt: skip
    b, phases, c = rate.shape
    levels, rows = max(phases, LEAST_LEVELS), b + b * c
    types = np.zeros(rows, TYPE)
    types["gpus"] = np.concatenate([[base.wants for base in bases], np.tile(options.count, b)])
    types["isolated_s"] = types["key_s"] = np.concatenate([alone, np.repeat(alone, c)])
    types["multi_node_factor"] = 1.0
    for i, base in enumerate(bases):
        for k, (gpu, count) in enumerate(zip(options.gpu.tolist(), options.count.tolist(), strict=True)):
            largest = max(group.gpus for group in kinds if group.gpu.name == models[gpu])
            if count <= largest:
                factor = base.model.apart.get(models[gpu], {}).get(count, 1.0)
                types["multi_node_factor"][b + i * c + k] = factor
    allowed = np.zeros((rows, len(kinds)), np.bool_)
    amount = np.zeros((levels, rows, len(kinds)), AMOUNT)
    phase = np.minimum(np.arange(levels), phases - 1)
    with np.errstate(divide="ignore"):
        seconds = (1.0 / rate)[:, phase, :]  # array of shape [B, levels, C]
    for k, group in enumerate(kinds):
        amount["cpu"][:, :, k] = int(group.cpus * 1000) // group.gpus
        amount["memory"][:, :, k] = group.memory_bytes // 10**6 // group.gpus
        amount["iteration_s"][:, :b, k] = alone
        amount["iteration_s"][:, b:, k] = seconds.transpose(1, 0, 2).reshape(levels, b * c)
        fits = np.array([models[gpu] == group.gpu.name for gpu in options.gpu])
        allowed[b:, k] = np.tile(fits, b) & (rate[:, 0, :] > 0).reshape(-1)
    return Demand(types, allowed, amount)


def _beside(bases: list[Base], profiles: ElasticProfiles, models: tuple[str, ...]) -> Floats:
    """Return [B, B, G]: the measured fraction of its full speed that a single-GPU job of the first base keeps when it
    shares a GPU with a job of the second base; 0 where it was not measured.
    """
    table = np.zeros((len(bases), len(bases), len(models)))
    for g, gpu in enumerate(models):
        measured = profiles.beside.get(gpu, {})
        for i, a in enumerate(bases):
            for k, b in enumerate(bases):
                if a.wants == b.wants == 1:
                    table[i, k, g] = measured.get((a.model.name, b.model.name), 0.0)
    return table


def _with_halves(demand: Demand, rate: Floats, options: Configurations, beside: Floats) -> Demand:
    """Add demand types for jobs that run on half of a GPU. Each such type has one level for each combination of a
    training phase and the base (kind) of the job on the other half.
    """
    b, phases, c = rate.shape
    levels, rows, kinds = demand.amount.shape
    first = demand.type[b:].copy()
    first["part_milli"] = 500
    amount = np.zeros((max(levels, phases * (1 + b)), rows + b * c, kinds), AMOUNT)
    amount[:levels, :rows] = demand.amount
    amount[levels:, :rows] = demand.amount[-1]
    half = demand.amount[:, b:].copy()
    half["cpu"] //= 2
    half["memory"] //= 2
    amount[:levels, rows:] = half
    amount[levels:, rows:] = half[-1]
    for other in range(b):
        keeps = beside[:, other][:, options.gpu].reshape(-1)  # array of shape [B x C]
        with np.errstate(divide="ignore"):
            slower = half["iteration_s"][:phases] / keeps[None, :, None]
        amount["iteration_s"][phases * (1 + other) : phases * (2 + other), rows:] = slower
    single = np.tile(options.count == 1, b)
    allowed = np.concatenate([demand.allowed, demand.allowed[b:] & single[:, None]])
    return Demand(np.concatenate([demand.type, first]), allowed, amount)
