"""Runs a partition policy: its input is a trace and a cluster, its output a record in the schema
of all runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cotenant.core.cluster import Cluster
from cotenant.core.errors import InputError, WorkError
from cotenant.core.mig import Geometry, geometry, kind_of, maximal_multisets, parse_layout, place
from cotenant.core.record.record import Record
from cotenant.core.units import counted
from cotenant.core.work import Jobs, Trace
from cotenant.policy.mig.decide import PartitionRules, warm_up
from cotenant.profiles.mig.mps_mig import MpsMigModel
from cotenant.profiles.mig.speeds import transfer_speeds
from cotenant.profiles.mig.workloads import measured_geometry, speeds_of, workloads
from cotenant.sim.mig.enforce import PartitionInput
from cotenant.sim.mig.engine import PartitionEngine
from cotenant.sim.mig.record import write_record
from cotenant.workloads.jobs.miso import MigLatencies, read_latencies

# a progress function, called with the number of finished jobs and the number of all jobs
Progress = Callable[[int, int], None]


@dataclass
class MigJobs:
    """The jobs of a partition policy, as arrays by job; speeds (jobs, kinds of instance) on the GPU to simulate and on
    the GPU on which they were measured."""

    work_s: np.ndarray
    launch_s: np.ndarray
    speeds: np.ndarray
    measured: np.ndarray
    measured_on: Geometry
    qos_floor: np.ndarray


@dataclass
class PartitionOutcome:
    """Counters and durations of a run of a partition policy that are not in its record."""

    engine_s: float
    reconfigurations: int
    profilings: int
    restarts: int
    layout: str | None
    # statistics of an integer-program solver; empty, since partition policies solve no integer program
    solver: dict[str, Any] = field(default_factory=dict)

    def extra(self) -> dict[str, Any]:
        """Return the result keys that only partition policies have."""
        return {
            "reconfigurations": self.reconfigurations,
            "profilings": self.profilings,
            "restarts": self.restarts,
            **({"layout": self.layout} if self.layout else {}),
        }


def cluster_geometry(cluster: Cluster, *, double_memory: bool | None = None) -> Geometry:
    """Return the MIG geometry of a cluster. InputError if its GPUs differ or have no MIG."""
    models = cluster.gpu_models
    if len(models) != 1:
        raise InputError(f"partition policies need one GPU model, not {', '.join(models)}", field="cluster")
    return geometry(models[0], double_memory=double_memory)


def mig_jobs(trace: Trace, geo: Geometry, *, default_profile: str | None = None) -> MigJobs:
    """Return the speeds of a trace's jobs on a geometry. If the trace has latencies, a job's own are used; otherwise
    those of the job's model in the table of measured workloads (profiles/mig/workloads.py).
    """
    jobs, n = trace.jobs, len(trace.jobs)
    own = read_latencies(trace.source.removeprefix("miso:")) if trace.source.startswith("miso:") else None
    base = own.measured_on if own else measured_geometry()
    latency = np.full((n, len(base.kinds)), np.nan)
    launch, floor, least = np.zeros(n), np.zeros(n), [""] * n
    row_of = {name: i for i, name in enumerate(own.id)} if own else {}
    for j in range(n):
        if own is not None and not np.isnan(jobs.iterations[j]):
            i = row_of[str(jobs.id[j])]
            latency[j], launch[j] = own.latency_s[i], own.launch_s[i]
            floor[j], least[j] = own.qos_floor[i], own.min_slice[i]
        else:
            latency[j], launch[j] = _from_table(jobs, j, base, default_profile, trace.source)
    measured = speeds_of(latency)
    if base.gpu != geo.gpu:
        remark = (
            f"speeds were measured on {base.gpu} and converted to {geo.gpu} by SM share; a whole {geo.gpu} counts "
            f"as fast as a whole {base.gpu}, so only the geometry differs"
        )
        trace.remarks += [] if remark in trace.remarks else [remark]
    speeds = measured if base.gpu == geo.gpu and base.kinds == geo.kinds else _carry(measured, base, geo)
    speeds = _at_least(speeds, geo, least, own)
    for j in map(int, np.flatnonzero(speeds[:, 0] <= 0)):
        raise InputError(f"job {jobs.id[j]!r} fits no slice of {geo.gpu}", file=trace.source)
    stated = jobs.iterations * latency[:, 0]
    work = np.where(np.isnan(stated), np.maximum(jobs.duration_s - launch, 0.1 * jobs.duration_s), stated)
    return MigJobs(work, launch, speeds, measured, base, floor)


def _carry(measured: np.ndarray, base: Geometry, geo: Geometry) -> np.ndarray:
    """Return the jobs' speeds on the kinds of MIG instance of the geometry `geo`, from those that were measured on
    `base`. If both are of the same GPU model, speeds are copied, and a kind that `base` lacks has the speed of 1g. For
    another GPU model, speeds are converted by the instances' shares of the SMs.
    """
    if base.gpu != geo.gpu:
        return transfer_speeds(measured, base, geo)
    out = np.zeros((len(measured), len(geo.kinds)))
    for i, kind in enumerate(geo.kinds):
        source = kind if kind in base.kinds else "1g"
        out[:, i] = measured[:, base.kinds.index(source)]
    return out


def _from_table(
    jobs: Jobs, j: int, base: Geometry, default_profile: str | None, source: str
) -> tuple[np.ndarray, float]:
    known = workloads()
    name = str(jobs.model[j])
    entry = known.get(name) or known.get(default_profile or "")
    if entry is None:
        wrong = default_profile if default_profile and default_profile not in known else name
        raise InputError(
            f"job {jobs.id[j]!r}: no MIG profile for model {wrong or '(none)'!r}; the table has "
            f"{', '.join(list(known)[:4])}, ... (or name one with --default-profile)",
            file=source,
            field="model",
        )
    row = np.full(len(base.kinds), np.nan)
    for kind, value in zip(measured_geometry().kinds, entry.latency_s, strict=True):
        row[base.kinds.index(kind)] = value
    return row, entry.launch_s


def _at_least(speeds: np.ndarray, geo: Geometry, least: list[str], own: MigLatencies | None) -> np.ndarray:
    """Return the jobs' speeds, set to 0 on MIG instances below each job's min_slice."""
    speeds = speeds.copy()
    for j, text in enumerate(least):
        if not text or own is None:
            continue
        profile = own.measured_on.profiles[kind_of(own.measured_on, text)]
        for i, p in enumerate(geo.profiles.values()):
            if p.compute < profile.compute or p.memory_slots < profile.memory_slots:
                speeds[j, i] = 0.0
    return speeds


def run_partition(
    trace: Trace,
    cluster: Cluster,
    rules: PartitionRules,
    *,
    out: Path | None = None,
    label: str | None = None,
    seed: int = 1,
    default_profile: str | None = None,
    double_memory: bool | None = None,
    more_options: Mapping[str, object] | None = None,
    on_ready: Callable[[], None] | None = None,
    progress: Progress | None = None,
) -> tuple[Record, PartitionOutcome]:
    """Run a trace to its end under a partition policy. The record is written to folder `out`, or kept in memory if that
    is None. `on_ready()` is called once the input is valid, before long computations; `progress(done, of)` as jobs
    finish. `more_options` are added to the policy's options in the record. InputError for jobs that cannot run on the
    cluster."""
    geo = cluster_geometry(cluster, double_memory=double_memory)
    jobs = mig_jobs(trace.require_jobs(), geo, default_profile=default_profile)
    if rules.policy == "static" and rules.layout:
        _refuse_homeless(trace, geo, jobs, rules)
    engine, engine_s = _simulate(trace, cluster, geo, jobs, rules, seed, on_ready, progress)
    stuck = np.flatnonzero(np.isnan(engine.work.finish))
    if len(stuck):
        raise WorkError(
            f"policy {rules.policy} left {counted(len(stuck), 'job')} waiting on an idle cluster (first: job "
            f"{trace.jobs.id[stuck[0]]}); each of them could run, so this is an error of the simulator"
        )
    layout = geo.format(rules.layout) if rules.layout else None
    alone = (jobs.work_s, jobs.launch_s)
    record = write_record(trace, cluster, rules, geo, *alone, engine, out, label, seed, more_options)
    outcome = PartitionOutcome(engine_s, engine.reconfigurations, engine.profilings, sum(engine.work.restarts), layout)
    return record, outcome


def _refuse_homeless(trace: Trace, geo: Geometry, jobs: MigJobs, rules: PartitionRules) -> None:
    """Raise InputError for a job that may run on no instance of a static layout."""
    kinds = [geo.kinds.index(p.kind) for p in rules.layout or ()]
    best = jobs.speeds[:, kinds].max(axis=1)
    for j in map(int, np.flatnonzero((best <= 0) | (best < jobs.qos_floor))):
        if trace.jobs.gpus[j] <= 1:
            raise InputError(
                f"job {trace.jobs.id[j]!r} may run on no slice of the layout {geo.format(rules.layout or ())}",
                file=trace.source,
                field="layout",
            )


def _simulate(
    trace: Trace,
    cluster: Cluster,
    geo: Geometry,
    jobs: MigJobs,
    rules: PartitionRules,
    seed: int,
    on_ready: Callable[[], None] | None = None,
    progress: Progress | None = None,
) -> tuple[PartitionEngine, float]:
    sizes = [g.gpus for g in cluster.groups if g.gpus for _ in range(g.count)]
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    gpus = np.maximum(np.ceil(trace.jobs.gpus), 1.0)
    if gpus.max() > len(nodes):
        j = int(gpus.argmax())
        raise InputError(
            f"job {trace.jobs.id[j]!r} needs {gpus[j]:.0f} GPUs; the cluster has {len(nodes)}",
            file=trace.source,
            field="gpus",
        )
    predict = None
    if rules.policy == "miso":
        model, rng = MpsMigModel.load(), np.random.default_rng([seed, 0x4D49])

        def predict(job: int, together: int) -> np.ndarray:
            row = model.draw(rng, str(trace.jobs.model[job]), together, jobs.measured[job], jobs.measured_on)
            return (
                row
                if jobs.measured_on is geo
                else _carry(np.where(jobs.measured[[job]] > 0, row[None], 0.0), jobs.measured_on, geo)[0]
            )

    if on_ready is not None:
        on_ready()
    warm_up(geo)
    data = PartitionInput(
        geo, nodes, trace.jobs.arrival_s, gpus, jobs.work_s, jobs.launch_s, jobs.speeds, jobs.qos_floor, predict
    )
    engine = PartitionEngine(data, rules)
    begin = time.perf_counter()
    engine.run(progress)
    return engine, time.perf_counter() - begin


def best_static(
    trace: Trace,
    cluster: Cluster,
    rules: PartitionRules,
    *,
    seed: int = 1,
    default_profile: str | None = None,
    double_memory: bool | None = None,
    progress: Progress | None = None,
) -> tuple[PartitionRules, dict[str, float]]:
    """Find the static layout with the lowest mean job completion time, by simulating every candidate. The candidates
    are all combinations of MIG instances to which no instance can be added, except those on which a job fits nowhere.
    `progress(done, of)` counts the jobs of all runs of the search together."""
    geo = cluster_geometry(cluster, double_memory=double_memory)
    jobs = mig_jobs(trace.require_jobs(), geo, default_profile=default_profile)
    found: dict[str, float] = {}
    best: tuple[float, PartitionRules] | None = None
    candidates = maximal_multisets(geo)
    for i, kinds in enumerate(candidates):
        usable = jobs.speeds[:, [geo.kinds.index(k) for k in kinds]]
        layout = place(geo, kinds)
        if layout is None or not (usable >= np.maximum(jobs.qos_floor, 1e-12)[:, None]).any(axis=1).all():
            continue
        candidate = replace(rules, policy="static", layout=layout)
        told = None if progress is None else partial(_tell_part, progress, i, len(candidates))
        engine, _ = _simulate(trace, cluster, geo, jobs, candidate, seed, progress=told)
        mean = float(np.mean(np.array(engine.work.finish) - trace.jobs.arrival_s))
        found[geo.format(layout)] = mean
        if best is None or mean < best[0]:
            best = (mean, candidate)
    if best is None:
        raise InputError(f"no static layout of {geo.gpu} has a slice for every job of the trace", field="layout")
    return best[1], dict(sorted(found.items(), key=lambda item: item[1]))


def _tell_part(progress: Progress, i: int, parts: int, done: int, of: int) -> None:
    progress(i * of + done, parts * of)


def named_rules(
    trace: Trace,
    cluster: Cluster,
    policy: str,
    *,
    layout: str = "",
    seed: int = 1,
    default_profile: str | None = None,
    double_memory: bool | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> tuple[PartitionRules, dict[str, float]]:
    """Create the rules of a partition policy from a user's options. `layout` is a layout, or `best` to search one, for
    policy static only. Also returns the mean job completion time of every layout in the search; `progress` reports the
    search. `options` are fields of PartitionRules.
    """
    if layout and policy != "static":
        raise InputError(f"--layout is for policy static, not {policy}", field="layout")
    if layout == "best":
        start = PartitionRules("whole", **options)
        return best_static(
            trace,
            cluster,
            start,
            seed=seed,
            default_profile=default_profile,
            double_memory=double_memory,
            progress=progress,
        )
    geo = cluster_geometry(cluster, double_memory=double_memory)
    return PartitionRules(policy, layout=parse_layout(geo, layout) if layout else None, **options), {}
