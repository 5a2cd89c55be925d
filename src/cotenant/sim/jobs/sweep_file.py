"""Reads sweep files: options, of which some have several values; a sweep runs all their combinations.

A point is the complete set of options of one run, by their names in the file. Paths in a file are relative to its
folder.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cotenant.core.cluster import Cluster
from cotenant.core.errors import InputError, nearest
from cotenant.core.units import parse_fraction, parse_rate_per_s, parse_seconds
from cotenant.core.work import Trace
from cotenant.core.yamlfile import YamlFile, parse_yaml, read_yaml
from cotenant.sim.jobs.options import TrainingConfig
from cotenant.sim.jobs.point import PolicyRun
from cotenant.sim.partition_options import PartitionOptions
from cotenant.workloads.clusters.forms import parse_cluster
from cotenant.workloads.jobs.generate import MAX_LOAD, Workload, generate
from cotenant.workloads.jobs.select import load_trace
from cotenant.workloads.trace_options import TraceOptions

MAX_POINTS = 100_000
DEFAULT_CLUSTER = "16x8"
PARTITION = tuple(name for name in PartitionOptions.__dataclass_fields__ if name != "against")
POLICY = (*TrainingConfig.model_fields, *PARTITION)
CLUSTER = ("cluster", "gpu", "cpus_per_node", "memory_per_node", "storage_mbps")
TEXTS = ("arrivals", "durations", "gpu_mix", "split", "split_mode")
DRAWN = ("jobs", "like", "load")  # options of a trace that a sweep generates
# options of a trace that a sweep reads from a file
READ = (
    "trace", "rate_scale", "gpu_counts", "max_jobs", "from", "to", "tenant", "only_gpus", "min_duration",
    "max_duration",
)  # fmt: skip
TRACE = (*READ, *DRAWN, "rate", *TEXTS, "seed")
# options that a record stores to describe its trace and cluster, so that reports can tell runs apart
SHOWN = (
    "load", "rate", "split", "gpu_mix", "arrivals", "durations", "rate_scale", "from", "to", "tenant", "only_gpus",
    "cpus_per_node",
)  # fmt: skip
KNOWN = {"title", *POLICY, *CLUSTER, *TRACE}

Point = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """A sweep file: its title, the options with one value, and the axes, which are options with several values."""

    title: str
    fixed: Point
    axes: dict[str, list[Any]]

    def points(self) -> Iterator[Point]:
        """Return every combination of the axes; the last axis changes fastest."""
        for values in itertools.product(*self.axes.values()):
            yield {**self.fixed, **dict(zip(self.axes, values, strict=True))}

    def one_at_a_time(self, names: tuple[str, ...]) -> Iterator[Point]:
        """Return the first point, then a point for each other value of the named axes, with all other options as in the
        first."""
        first = {**self.fixed, **{name: values[0] for name, values in self.axes.items()}}
        yield first
        for name in names:
            for value in self.axes.get(name, [])[1:]:
                yield {**first, name: value}

    def __len__(self) -> int:
        n = 1
        for values in self.axes.values():
            n *= len(values)
        return n


def read_sweep(path: Path, changes: Sequence[str] = ()) -> Sweep:
    """Read and check a sweep file. InputError names file, line and field. `changes`: texts "name=value" in YAML that
    replace options of the file; their paths are relative to the working folder."""
    read = _load(path)
    with read.located():
        options = _checked(read.content, path)
    changed = _changes(changes)
    options |= changed
    title = str(options.pop("title", path.stem))
    axes = {name: value for name, value in options.items() if isinstance(value, list) and len(value) > 1}
    fixed = {
        name: value[0] if isinstance(value, list) else value for name, value in options.items() if name not in axes
    }
    sweep = Sweep(title, fixed, axes)
    if len(sweep) > MAX_POINTS:
        raise InputError(f"has {len(sweep):,} combinations; at most {MAX_POINTS:,}", file=path)
    try:
        with read.located():
            _check_points(sweep, path)
    except InputError as error:
        name = (error.field or "").replace("-", "_")
        if name not in changed or error.file != str(path):
            raise
        raise InputError(error.message, field=f"--set {name}") from None
    return sweep


def _load(path: Path) -> YamlFile:
    read = read_yaml(path)
    if not isinstance(read.content, dict) or not read.content:
        raise InputError("is not a sweep file: it needs options such as ordering: [fifo, las]", file=path)
    return read


def _changes(texts: Sequence[str]) -> Point:
    """Return the texts "name=value" of the command line as options of a sweep, with absolute paths."""
    raw: Point = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            raw[name.strip()] = parse_yaml(value).content
        except InputError:
            raise InputError(f"the value of {text!r} is not YAML", field="set") from None
        if not equals or raw[name.strip()] is None:
            raise InputError(f"{text!r} is not NAME=VALUE, such as seed=[1,2,3]", field="set")
    try:
        options = _checked(raw, None)
    except InputError as error:
        raise InputError(error.message, field=f"--set {error.field}") from None
    here = Path.cwd()
    for name, value in options.items():
        if isinstance(value, list):
            options[name] = [located({name: item}, here)[name] for item in value]
        else:
            options[name] = located({name: value}, here)[name]
    return options


def _checked(raw: Point, path: Path | None) -> Point:
    """Return the options of a sweep file by their names with underscores; each has a value or a list of values."""
    options: Point = {}
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        if name not in KNOWN:
            hint = nearest(name, sorted(KNOWN)) or f"known: {', '.join(sorted(KNOWN))}"
            raise InputError(f"is not an option of a sweep; {hint}", file=path, field=name)
        for item in value if isinstance(value, list) and value else [value]:
            if not isinstance(item, str | int | float):
                raise InputError("needs a value or a list of values", file=path, field=name)
        if isinstance(value, list) and len(set(map(str, value))) < len(value):
            raise InputError("names a value twice", file=path, field=name)
        options[name] = value
    return options


def _check_points(sweep: Sweep, path: Path) -> None:
    """Check all values of a sweep before its first run starts, each axis (option with several values) separately."""
    _check_trace_options(sweep, path)
    try:
        for point in sweep.one_at_a_time(POLICY):
            policy_run(point, path.parent)
        for point in sweep.one_at_a_time(CLUSTER):
            cluster = cluster_of(point, path.parent)
        for point in sweep.one_at_a_time(("seed",)):
            seed_of(point)
        for point in sweep.one_at_a_time(tuple(name for name in TRACE if name != "seed")):
            _check_measure(point, trace_of(_small(point), cluster, path.parent), path)
    except InputError as error:
        if error.file is not None:
            raise
        raise InputError(error.message, file=path, field=error.field) from None


def _check_trace_options(sweep: Sweep, path: Path) -> None:
    names = {*sweep.fixed, *sweep.axes}
    if "trace" not in names and "jobs" not in names:
        raise InputError("needs a trace, or jobs: N for a generated one", file=path, field="trace")
    for name in DRAWN if "trace" in names else READ:
        if name in names:
            why = (
                "cannot be used with a trace that is read from a file, unlike max_jobs, rate_scale and rate"
                if "trace" in names
                else "cannot be used with a generated trace, unlike jobs, load and rate"
            )
            raise InputError(why, file=path, field=name)


def _check_measure(point: Point, trace: Trace, path: Path) -> None:
    config = policy_run(point, path.parent).config
    measure = None if config is None else config.measure
    jobs = point.get("jobs", len(trace.jobs))
    if measure is not None and measure[0] >= int(jobs):
        raise InputError(f"begins at job {measure[0]:,}; there are {int(jobs):,}", file=path, field="measure")


def _small(point: Point) -> Point:
    """Return the sweep point with only a few generated jobs, which suffice to find errors."""
    if "jobs" not in point:
        return point
    return {**point, "jobs": min(_whole(point["jobs"], "jobs"), 100)}


def key_of(point: Point, base: Path) -> str:
    """Return the name of a point's folder: a hash of its options, of the files that the options name, and of the
    program's version.
    """
    content = {name: digest_of(path) for name, path in paths_of(point, base).items()}
    text = json.dumps([point, content, version("cotenant")], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def digest_of(path: Path) -> str:
    try:
        status = path.stat()
        return _digest(path, status.st_mtime_ns, status.st_size)
    except OSError:
        return ""  # the reader that opens the file later reports the error


@functools.lru_cache(maxsize=256)
def _digest(path: Path, mtime_ns: int, size_bytes: int) -> str:
    """Return the hash of a file's content, which is read again only if its time or size changes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def paths_of(point: Point, base: Path) -> dict[str, Path]:
    """Return the paths of the files that a sweep point names, by option."""
    found = {}
    for name, value in point.items():
        text = str(value)
        form, _, last = text.rpartition(":")
        drawn_from = name in ("arrivals", "durations") and text.startswith("trace:")
        is_file = name in ("trace", "gittins_sample", "profiles") or drawn_from
        if is_file or (name == "cluster" and (form or not re.fullmatch(r"\s*\d+x\d+\s*", text))):
            found[name] = base / last
    return found


def located(point: Point, base: Path) -> Point:
    """Return the sweep point with its paths made relative to the working folder."""
    paths = {}
    for name, path in paths_of(point, base).items():
        form, colon, _ = str(point[name]).rpartition(":")
        paths[name] = f"{form}{colon}{path}"
    return {**point, **paths}


def policy_run(point: Point, base: Path) -> PolicyRun:
    """Return the policy of a sweep point with its options, checked."""
    return PolicyRun.of(located(point, base))


def cluster_of(point: Point, base: Path) -> Cluster:
    """Return the cluster that a sweep point describes."""
    point = located(point, base)
    cpus, storage, memory = (point.get(name) for name in ("cpus_per_node", "storage_mbps", "memory_per_node"))
    return parse_cluster(
        str(point.get("cluster", DEFAULT_CLUSTER)),
        gpu=str(point["gpu"]) if "gpu" in point else None,
        cpus_per_node=None if cpus is None else _number(cpus, "cpus-per-node"),
        memory_per_node=memory,
        storage_mbps=None if storage is None else _number(storage, "storage-mbps"),
    )


def trace_of(point: Point, cluster: Cluster, base: Path) -> Trace:
    """Return the job trace of a sweep point, which is read from a file or generated from its seed."""
    models = policy_run(point, base).models
    point = located(point, base)
    texts: dict[str, Any] = {name: str(point[name]) for name in TEXTS if name in point}
    seed = seed_of(point)
    rate = parse_rate_per_s(point["rate"], "rate") if "rate" in point else None
    if "trace" in point:
        options = TraceOptions(
            rate_scale=_number(point.get("rate_scale", 1.0), "rate_scale"),
            gpu_counts=str(point.get("gpu_counts", "all")),
            max_jobs=_whole(point["max_jobs"], "max_jobs") if "max_jobs" in point else None,
            from_s=parse_seconds(point.get("from", 0.0), "from"),
            to_s=_seconds(point, "to"),
            tenants=(str(point["tenant"]),) if "tenant" in point else (),
            only_gpus=tuple(_whole(part, "only_gpus") for part in str(point["only_gpus"]).split(","))
            if "only_gpus" in point
            else (),
            min_duration_s=parse_seconds(point.get("min_duration", 0.0), "min_duration"),
            max_duration_s=_seconds(point, "max_duration"),
            rate_per_s=rate,
            seed=seed,
            **texts,
        )
        return load_trace(
            str(point["trace"]), options,
            classes=models.classes, iteration_s=models.iteration_s, lengths=models.lengths,
            named_gpus=models.named_gpus,
        )  # fmt: skip
    load = point.get("load")
    workload = Workload(
        jobs=_whole(point["jobs"], "jobs"),
        like=str(point.get("like", "synergy")),
        rate_per_s=rate,
        load=parse_fraction(load, "load", most=MAX_LOAD) if load is not None else None,
        cluster_gpus=cluster.total_gpus,
        seed=seed,
        **texts,
    )
    return generate(workload, models.classes or {}, models.iteration_s).trace


def seed_of(point: Point) -> int:
    """Return the seed for the random parts of a sweep point."""
    return _whole(point.get("seed", 1), "seed")


def _number(value: Any, field: str) -> float:
    if isinstance(value, bool):  # float() would take it as 1 or 0
        raise InputError(f"{str(value).lower()} is not a number", field=field)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InputError(f"{value!r} is not a number", field=field) from None


def _seconds(point: Point, name: str) -> float:
    return parse_seconds(point[name], name) if name in point else math.inf


def _whole(value: Any, field: str) -> int:
    number = _number(value, field)
    if not number.is_integer():
        raise InputError(f"{value!r} is not a whole number", field=field)
    return int(number)


def run_point(point: Point, folder: Path, base: Path, shown: Point | None = None) -> None:
    """Run the simulation of a sweep point and write its record into `folder`. Afterwards the record is complete or
    absent. The record shows the options of `shown` instead of those of `point`, if it is given: on a machine of a
    Ray cluster that lacks the input files, the options in `point` have the paths of temporary copies.
    """
    more = {name: value for name, value in (shown or point).items() if name in SHOWN}
    cluster = cluster_of(point, base)
    trace = trace_of(point, cluster, base)
    policy_run(point, base).run(trace, cluster, folder, more, seed_of(point))
