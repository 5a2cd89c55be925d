"""The training simulator: it carries out job policies in virtual time. The loop itself is compiled
(sim.jobs.kernel)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from cotenant.core import work
from cotenant.core.cluster import Cluster
from cotenant.core.errors import InputError, WorkError
from cotenant.core.record.record import Record, cluster_info, jobs_table
from cotenant.core.record.schema import RunInfo
from cotenant.core.record.writer import RecordWriter
from cotenant.policy.jobs.arrays import IDEAL, JOB, Array, Demand
from cotenant.policy.jobs.choice import JobPolicy
from cotenant.policy.jobs.demand import Workload, build_workload
from cotenant.policy.jobs.optimal import LevelChooser
from cotenant.policy.jobs.rounds import Choice, gang_prefix
from cotenant.profiles.training.tables import Profiles
from cotenant.sim.jobs import kernel
from cotenant.sim.jobs.state import (
    C_ACTIVE,
    C_EVENTS,
    C_NODES,
    C_ROUNDS,
    EVENT,
    ROUND,
    Options,
    World,
    make_progress,
    make_world,
)
from cotenant.sim.jobs.window import JOBS_AT_ONCE, Window

IDLE_ROUNDS = 10_000  # a run is aborted after this many successive rounds in which restarts take all the time
MAX_LEASES_OF_A_JOB = 50_000_000
MOVES_RECORDED_UP_TO = 20_000  # placements of jobs are recorded only on request in runs with more jobs than this


@dataclass(frozen=True)
class EngineOptions:
    """Options of the training simulator as the user gives them. Times are in seconds."""

    lease_s: float = 300.0
    finish: str = "exact"  #: exact | lease-end
    speeds: str = "matrix"  #: matrix | two-speed
    restart_cost_s: float = 0.0
    checkpoint_cost_s: float = 0.0
    # for each job, how long its first start takes before any work is done; None: 0
    launch_s: NDArray[np.float64] | None = None
    default_profile: str | None = None
    trace_gpu: str | None = None  # GPU model to which the trace's run times refer; None: the cluster's first model
    # None: placements are recorded only in runs of up to MOVES_RECORDED_UP_TO jobs
    record_placements: bool | None = None
    # number of arrivals that are loaded together; it changes the memory used, not the result
    jobs_at_once: int = JOBS_AT_ONCE

    @property
    def whole_iterations(self) -> bool:
        """Whether only whole iterations count, as in the public Synergy simulator. True if the options select that
        simulator's rules for speeds and for ends of jobs."""
        return self.speeds == "two-speed" and self.finish == "lease-end"


@dataclass
class Outcome:
    """Results of a run that are not in its record, such as real durations."""

    engine_s: float  # real duration in s of the event loop, without reading, compiling and summarizing
    solver: dict[str, Any] = field(default_factory=dict)
    lacks: str = ""  #: a sentence that says what the run lacks, such as jobs that were never started


def run_training(
    trace: work.Trace,
    cluster: Cluster,
    profiles: Profiles,
    policy: JobPolicy,
    options: EngineOptions,
    out: Path | None = None,
    label: str | None = None,
    more_options: dict[str, object] | None = None,
    progress: Callable[[int, int], None] | None = None,
    on_ready: Callable[[], None] | None = None,
) -> tuple[Record, Outcome]:
    """Run the trace to its end. The record is written to folder `out`, or kept in memory if that is None. `on_ready()`
    is called once the input is valid, before long computations; `progress(finished, jobs)` whenever events are written.
    Raises InputError for jobs that cannot run on the cluster, and WorkError if some job never finishes."""
    trace.require_jobs()
    workload = build_workload(
        trace.jobs,
        profiles,
        cluster,
        two_speed=options.speeds == "two-speed",
        proportional_keys=policy.allotment == "proportional",
        whole_iterations=options.whole_iterations,
        grid=policy.allotment == "optimal",
        default_profile=options.default_profile,
        trace_gpu=options.trace_gpu,
        trace=trace,
    )
    _check_length(trace.jobs, workload, options.lease_s)
    window = _window(trace.jobs, workload, policy, options)
    chooser = LevelChooser(workload.demand, workload.nodes, policy.solver_limit_s)
    info = describe_run(trace, cluster, policy, options, label)
    info.options.update(more_options or {})
    if on_ready is not None:
        on_ready()
    warm_up(workload.demand, workload.nodes, policy.choice())
    with RecordWriter(out, info, recorded_jobs(trace.jobs, workload)) as writer:
        started = time.perf_counter()
        run_window(window, partial(_choose_levels, chooser), writer, progress)
        engine_s = time.perf_counter() - started
        never = window.unfinished()
        if len(never):
            raise WorkError(
                f"{len(never)} jobs can never run here (first: job {trace.jobs.id[never[0]]}): no node has as much CPU "
                f"and memory as allotment {policy.allotment!r} asks for"
            )
        record = writer.close()
    return record, Outcome(engine_s, chooser.summary() if policy.allotment == "optimal" else {})


def _check_length(jobs: work.Jobs, workload: Workload, lease_s: float) -> None:
    """Refuse runs with too many rounds (leases): every round is recorded, so such runs would use up the memory after
    hours.
    """
    alone_s = workload.demand.type["isolated_s"][workload.type] * workload.iterations
    longest = int(np.argmax(alone_s))
    leases = float(alone_s[longest]) / lease_s
    if leases > MAX_LEASES_OF_A_JOB:
        raise InputError(
            f"job {jobs.id[longest]} alone takes {leases:.3g} leases of {lease_s:g} s; at most "
            f"{MAX_LEASES_OF_A_JOB:,} can be simulated, so use a longer --lease",
            field="lease",
        )


def warm_up(demand: Demand, nodes: Array, choice: Choice) -> None:
    """Compile the kernel, or load it from the cache, so that measured durations are those of the run only."""
    options = Options(1.0, False, False, False, 1, False)
    context = JobPolicy().context(np.ones(1), 1.0)
    kernel.advance(make_world(np.zeros(0, JOB), demand, nodes, choice, context, options))


def _window(trace_jobs: work.Jobs, workload: Workload, policy: JobPolicy, options: EngineOptions) -> Window:
    n, types = len(trace_jobs), workload.demand.type
    keep = options.record_placements
    recorded = n <= MOVES_RECORDED_UP_TO if keep is None else keep
    cost_s = float(options.restart_cost_s + options.checkpoint_cost_s)
    unlike = workload.demand.amount.shape[2] > 1 or bool((types["multi_node_factor"] != 1).any())
    kernel_options = Options(
        lease_s=float(options.lease_s),
        exact_finish=options.finish == "exact",
        whole_iterations=options.whole_iterations,
        record_moves=recorded,
        idle_limit=IDLE_ROUNDS + int(10 * cost_s / options.lease_s),
        moves_matter=recorded or cost_s > 0 or unlike,
    )

    def load(first: int, last: int) -> tuple[Array, Array]:
        rows = slice(first, last)
        jobs, progress = np.zeros(last - first, JOB), make_progress(last - first)
        jobs["type"], jobs["total"] = workload.type[rows], workload.iterations[rows]
        jobs["priority"] = trace_jobs.priority[rows]
        jobs["arrival_s"] = jobs["last_run_s"] = trace_jobs.arrival_s[rows]
        jobs["wanted"] = IDEAL
        progress["resume_s"] = cost_s
        if options.launch_s is not None:
            progress["debt_s"] = options.launch_s[rows]
        return jobs, progress

    jobs, progress = load(0, min(n, options.jobs_at_once))
    sample = _gpu_seconds(workload) if policy.ordering == "gittins" else np.zeros(0)
    context = policy.context(sample, float(workload.nodes["gpus"].sum()))
    world = make_world(jobs, workload.demand, workload.nodes, policy.choice(), context, kernel_options)
    world.run.job[:] = progress
    return Window(world, n, load, options.jobs_at_once)


def _gpu_seconds(workload: Workload) -> NDArray[np.float64]:
    types = workload.demand.type
    gpus = np.where(types["part_milli"] > 0, types["part_milli"] / 1000.0, types["gpus"])
    return np.asarray((gpus * types["isolated_s"])[workload.type] * workload.iterations)


def _choose_levels(chooser: LevelChooser, world: World) -> None:
    run, jobs = world.run, world.jobs
    n = int(run.counters[C_ACTIVE])
    selected = world.scratch.selected
    count = gang_prefix(run.order, n, jobs, world.demand, int(world.nodes["gpus"].sum()), selected)
    jobs["wanted"][run.order[:n]] = IDEAL
    chooser.choose(selected[:count], jobs)


def run_window(
    window: Window,
    choose: Callable[[World], None],
    writer: RecordWriter,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Run the event loop until all jobs of the trace have ended, and record the run. `window` holds the event loop's
    arrays, in which only a part of the trace's jobs is loaded at a time (window.py). `choose(world)` is called when the
    policy has to decide.
    """
    while True:
        status = kernel.advance(window.world)
        if status == kernel.NOWHERE:
            raise WorkError(
                f"for {IDLE_ROUNDS:,} rounds no job made progress: jobs take turns, and restarts and checkpoints "
                "take longer than their turns; use a longer --lease or --sticky"
            )
        if status == kernel.NEED_CHOICE:
            choose(window.world)
            if progress is not None:  # a policy may take long to decide; the events of many rounds fit the buffers
                progress(window.finished, window.jobs)
            continue
        _flush(window, writer)
        if progress is not None:
            progress(window.finished, window.jobs)
        if status == kernel.DONE:
            return
        if window.needs_jobs():
            window.advance()


def _flush(window: Window, writer: RecordWriter) -> None:
    """Write the events of the compiled loop to the record, and clear the buffers."""
    c, out = window.world.run.counters, window.world.out
    events, rounds = out.event[: int(c[C_EVENTS])], out.round[: int(c[C_ROUNDS])]
    columns: dict[str, Any] = {name: events[name] for name in EVENT.names or () if name != "node_end"}
    columns["job"] = window.rows[events["job"]]
    if window.world.options.record_moves:
        nodes = out.node[: int(c[C_NODES])]
        columns |= {
            "node_offset": np.concatenate([np.zeros(1, np.int64), events["node_end"]]),
            "node_ids": nodes["node"],
            "node_gpus": nodes["gpus"],
        }
    writer.append_events(**columns)
    writer.append_rounds(**{name: rounds[name] for name in ROUND.names or ()})
    c[C_EVENTS] = c[C_NODES] = c[C_ROUNDS] = 0


def recorded_jobs(jobs: work.Jobs, workload: Workload) -> Iterator[pl.DataFrame]:
    """Produce the record's table of jobs, piece by piece."""
    demand = workload.demand
    rows, reference = np.arange(len(demand.type)), np.argmax(demand.allowed, axis=1)
    ideal, gpus = demand.amount[IDEAL, rows, reference], demand.type["gpus"]
    for first in range(0, len(jobs), JOBS_AT_ONCE):
        part = slice(first, first + JOBS_AT_ONCE)
        types, iterations = workload.type[part], workload.iterations[part]
        yield jobs_table(
            jobs.take(part),
            isolated_s=demand.type["isolated_s"][types] * iterations,
            ideal_s=ideal["iteration_s"][types] * iterations,
            ideal_cpus=(ideal["cpu"] * gpus)[types] / 1000.0,
            ideal_memory_bytes=(ideal["memory"] * gpus)[types] * 1e6,
        )


def describe_run(
    trace: work.Trace, cluster: Cluster, policy: JobPolicy, options: EngineOptions, label: str | None = None
) -> RunInfo:
    """Return the description of the run for the record's file run.json."""
    jobs = len(trace.jobs)
    placements = options.record_placements
    return RunInfo(
        label=label or policy.label(),
        seed=trace.seed,
        options={
            "ordering": policy.ordering,
            "allotment": policy.allotment,
            "placement": policy.placement,
            "sticky": policy.sticky,
            "reserve_after_s": None if np.isinf(policy.reserve_after_s) else policy.reserve_after_s,
            "lease_s": options.lease_s,
            "finish": options.finish,
            "speeds": options.speeds,
            "trace_gpu": options.trace_gpu,
            "restart_cost_s": options.restart_cost_s,
            "checkpoint_cost_s": options.checkpoint_cost_s,
        },
        trace={
            "source": trace.source,
            "jobs": jobs,
            "left_out": trace.left_out,
            "remarks": trace.remarks,
        },
        cluster=cluster_info(cluster),
        placements=jobs <= MOVES_RECORDED_UP_TO if placements is None else placements,
    )
