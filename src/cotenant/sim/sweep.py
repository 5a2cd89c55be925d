"""Sweeps: every combination of a sweep file as a run of its own, on all cores, resumable.

A sweep is a list of points; a point is a run's whole set of options. Each run's folder is named by a hash of them and
appears only when the run is done, so an interrupted sweep goes on where it stopped, and a changed file keeps the runs
that are still asked for.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml

from cotenant.config import TrainingConfig, training_config
from cotenant.model.cluster import Cluster
from cotenant.model.errors import InputError
from cotenant.model.units import parse_fraction, parse_rate_per_s
from cotenant.model.work import Trace
from cotenant.profile.tables import Profiles, load_profiles
from cotenant.record.files import atomic_file
from cotenant.traces.cluster_files import parse_cluster
from cotenant.traces.generate import Workload, generate
from cotenant.traces.options import TraceOptions
from cotenant.traces.select import load_trace

MAX_POINTS = 100_000
POLICY = tuple(TrainingConfig.model_fields)
CLUSTER = ("cluster", "gpu", "cpus_per_node", "memory_per_node", "storage_mbps")
DRAWN = ("jobs", "like", "rate", "load", "arrivals", "durations", "gpu_mix", "split", "split_mode", "seed")
READ = ("rate_scale", "gpu_counts", "max_jobs", "split", "split_mode", "seed", "arrivals", "durations", "gpu_mix")
TEXTS = ("arrivals", "durations", "gpu_mix", "split", "split_mode")
# what a record says of how its trace and cluster were made, for reports to tell runs apart
SHOWN = ("load", "rate", "split", "gpu_mix", "rate_scale", "cpus_per_node")
KNOWN = {"trace", "title", *POLICY, *CLUSTER, *DRAWN, *READ}

Point = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """A sweep file: its title, the options with one value, and the axes (options with several)."""

    title: str
    fixed: Point
    axes: dict[str, list[Any]]

    def points(self) -> Iterator[Point]:
        """Every combination, the last axis fastest."""
        for values in itertools.product(*self.axes.values()):
            yield {**self.fixed, **dict(zip(self.axes, values, strict=True))}

    def __len__(self) -> int:
        n = 1
        for values in self.axes.values():
            n *= len(values)
        return n


def read_sweep(path: Path) -> Sweep:
    """Read and check a sweep file; InputError names file and field. Paths of traces are relative to the file."""
    try:
        raw = yaml.safe_load(path.read_text())
    except OSError as error:
        raise InputError(f"cannot read it: {error.strerror}", file=path) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        raise InputError("is not YAML", file=path, line=mark.line + 1 if mark else None) from None
    if not isinstance(raw, dict) or not raw:
        raise InputError("is not a sweep file: it needs options such as ordering: [fifo, las]", file=path)
    options = {str(name).replace("-", "_"): value for name, value in raw.items()}
    for name, value in options.items():
        if name not in KNOWN:
            raise InputError(f"is not an option of a sweep; known: {', '.join(sorted(KNOWN))}", file=path, field=name)
        if value is None or value == [] or isinstance(value, dict):
            raise InputError("needs a value or a list of values", file=path, field=name)
    title = str(options.pop("title", path.stem))
    axes = {name: value for name, value in options.items() if isinstance(value, list) and len(value) > 1}
    fixed = {
        name: value[0] if isinstance(value, list) else value for name, value in options.items() if name not in axes
    }
    sweep = Sweep(title, fixed, axes)
    if len(sweep) > MAX_POINTS:
        raise InputError(f"has {len(sweep):,} combinations; at most {MAX_POINTS:,}", file=path)
    _check_points(sweep, path)
    return sweep


def _check_points(sweep: Sweep, path: Path) -> None:
    """Find wrong values before the first run starts. Traces are read later, once each."""
    from cotenant.sim.training import policy_of

    profiles = load_profiles(sweep.fixed.get("profiles"))
    for name in [*sweep.fixed, *sweep.axes]:
        for value in sweep.axes.get(name, [sweep.fixed.get(name)]):
            if name in POLICY:
                config = training_config({name: value}, path)
                if name in ("ordering", "allotment", "placement"):
                    policy_of(config, profiles)
    for values in itertools.product(*(sweep.axes.get(n, [sweep.fixed.get(n)]) for n in CLUSTER)):
        _cluster(dict(zip(CLUSTER, values, strict=True)))
    if "trace" not in sweep.fixed and "trace" not in sweep.axes:
        if "jobs" not in sweep.fixed and "jobs" not in sweep.axes:
            raise InputError("needs a trace, or jobs: N for drawn ones", file=path, field="trace")
    elif "jobs" in sweep.fixed or "load" in sweep.fixed or "load" in sweep.axes:
        field = "jobs" if "jobs" in sweep.fixed else "load"
        raise InputError("goes with drawn traces only; a trace that is read takes rate_scale", file=path, field=field)


def key_of(point: Point) -> str:
    """Name of a point's folder: a hash of its options."""
    text = json.dumps(point, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def label_of(point: Point) -> str:
    """The policy in words, as tables and legends show it."""
    from cotenant.sim.training import policy_of

    config = _config(point)
    return policy_of(config, load_profiles(config.profiles)).label()


def _config(point: Point) -> TrainingConfig:
    return training_config({name: point[name] for name in POLICY if name in point})


def _cluster(point: Point) -> Cluster:
    cpus, storage = point.get("cpus_per_node"), point.get("storage_mbps")
    return parse_cluster(
        str(point.get("cluster") or "16x8"),
        gpu=point.get("gpu"),
        cpus_per_node=None if cpus is None else float(cpus),
        memory_per_node=point.get("memory_per_node"),
        storage_mbps=None if storage is None else float(storage),
    )


def trace_of(point: Point, cluster: Cluster, profiles: Profiles, base: Path) -> Trace:
    """The point's trace: read, or drawn from its seed."""
    texts: dict[str, Any] = {name: str(point[name]) for name in TEXTS if name in point}
    seed = int(point.get("seed", 1))
    rate = parse_rate_per_s(point["rate"], "rate") if "rate" in point else None
    if "trace" in point:
        form, _, path = str(point["trace"]).rpartition(":")
        spec = f"{form}:{base / path}" if form else str(base / path)
        options = TraceOptions(
            rate_scale=float(point.get("rate_scale", 1.0)),
            gpu_counts=str(point.get("gpu_counts", "all")),
            max_jobs=point.get("max_jobs"),
            rate_per_s=rate,
            seed=seed,
            **texts,
        )
        return load_trace(spec, options, classes=profiles.classes, iteration_s=profiles.iteration_s)
    load = point.get("load")
    workload = Workload(
        jobs=int(point["jobs"]),
        like=str(point.get("like", "synergy")),
        rate_per_s=rate,
        load=parse_fraction(load, "load", most=100.0) if load is not None else None,
        cluster_gpus=cluster.total_gpus,
        seed=seed,
        **texts,
    )
    return generate(workload, profiles.classes, profiles.iteration_s).trace


def run_point(point: Point, folder: Path, base: Path) -> dict[str, Any]:
    """Run one point into its folder and return its summary; the record is complete or absent."""
    from cotenant.metrics.summary import summarise
    from cotenant.sim.training import simulate

    config = _config(point)
    profiles = load_profiles(config.profiles)
    cluster = _cluster(point)
    more = {name: value for name, value in point.items() if name in SHOWN}
    trace = trace_of(point, cluster, profiles, base)
    record, outcome = simulate(trace, cluster, config, profiles=profiles, out=folder, more_options=more)
    return {**summarise(record), "engine_s": outcome.engine_s, "seed": record.info.seed}


def _worker(point: Point, folder: str, base: str) -> dict[str, Any]:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it stops handing out work
    return run_point(point, Path(folder), Path(base))


def compile_once() -> None:
    """Bring the kernels into the cache, so that workers need not compile them each."""
    from cotenant.policy.choice import JobPolicy
    from cotenant.policy.compiled import is_compiled
    from cotenant.policy.demand import build_workload
    from cotenant.sim.engine import warm_up

    if not is_compiled():
        trace = generate(Workload(jobs=1, rate_per_s=1.0), load_profiles().classes, load_profiles().iteration_s).trace
        workload = build_workload(trace.jobs, load_profiles(), parse_cluster("1x8"))
        warm_up(workload.demand, workload.nodes, JobPolicy())


def run_sweep(
    sweep: Sweep,
    out: Path,
    base: Path,
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Run what is not done yet; returns the folders of all runs, in the sweep's order.

    Interrupted (KeyboardInterrupt), finished runs stay, running ones leave nothing, and the next call goes on.
    """
    points = list(sweep.points())
    folders = [out / "runs" / key_of(point) for point in points]
    out.mkdir(parents=True, exist_ok=True)
    todo = [(p, f) for p, f in zip(points, folders, strict=True) if not (f / "run.json").exists()]
    done = len(points) - len(todo)
    if progress is not None:
        progress(done, len(points))
    if todo:
        compile_once()
    pool = ProcessPoolExecutor(min(workers or os.cpu_count() or 1, max(len(todo), 1)), mp_context=get_context("spawn"))
    try:
        pending: set[Future[dict[str, Any]]] = {pool.submit(_worker, p, str(f), str(base)) for p, f in todo}
        while pending:
            finished, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in finished:
                future.result()
                done += 1
                if progress is not None:
                    progress(done, len(points))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    with atomic_file(out / "sweep.json") as file:
        axes = {name: [str(value) for value in values] for name, values in sweep.axes.items()}
        runs = [{"folder": f"runs/{f.name}", **p} for p, f in zip(points, folders, strict=True)]
        json.dump({"title": sweep.title, "axes": axes, "runs": runs}, file, indent=1, default=str)
    return folders
