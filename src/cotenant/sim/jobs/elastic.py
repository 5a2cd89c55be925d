"""Runs elastic policies in the training simulator. Its compiled event loop (kernel.py) returns before each round
(lease), so that the policy, which is Python code, decides which jobs run, and on how many GPUs of which model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from cotenant.core import work
from cotenant.core.cluster import Cluster
from cotenant.core.errors import InputError
from cotenant.core.record.record import Record, cluster_info
from cotenant.core.record.schema import RunInfo
from cotenant.core.record.writer import RecordWriter
from cotenant.core.units import counted, parse_seconds
from cotenant.policy.elastic.registry import find_elastic
from cotenant.policy.elastic.view import NONE, Decision, ElasticPolicy, View
from cotenant.policy.jobs.allotment import A_ELASTIC
from cotenant.policy.jobs.arrays import JOB, NOT_RUNNING
from cotenant.policy.jobs.choice import JobPolicy
from cotenant.policy.jobs.demand import Workload
from cotenant.policy.jobs.ordering import FIFO
from cotenant.policy.jobs.placement import FEWEST_NODES
from cotenant.policy.jobs.rounds import Choice
from cotenant.sim.jobs.elastic_models import profiles_for
from cotenant.sim.jobs.elastic_world import ElasticTables, build_tables
from cotenant.sim.jobs.engine import IDLE_ROUNDS, Outcome, recorded_jobs, run_window, warm_up
from cotenant.sim.jobs.state import C_ACTIVE, C_TICK, Options, World, make_world
from cotenant.sim.jobs.window import Window

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


# the options of ordinary job policies that elastic policies have, too
TAKEN = ("lease", "restart_cost", "solver_limit", "profiles", "default_profile", "trace_gpu")


@dataclass(frozen=True)
class ElasticOptions:
    """Options of a simulation under an elastic policy, as the user gives them. Times are in seconds."""

    policy: str
    profiles: str | None = None  #: elastic profiles; None: the policy's default ones
    lease_s: float | None = None  #: length of a round; None: that of the policy's paper
    #: time lost when a job that ran before restarts, moves or changes its GPUs; None: that of the job's profile
    restart_s: float | None = None
    solver_limit_s: float = 1.0
    default_profile: str | None = None
    trace_gpu: str | None = None


def elastic_options(policy: str, given: Mapping[str, Any]) -> ElasticOptions:
    """Return the options of the elastic policy named `policy`. `given`: option names of job policies (TAKEN), with the
    user's values. InputError for an option that elastic policies do not have."""
    for name in given:
        if name not in TAKEN:
            raise InputError(f"is for job policies; policy {policy} does not have it", field=name.replace("_", "-"))

    def seconds(name: str) -> float | None:
        return parse_seconds(given[name], field=name.replace("_", "-")) if name in given else None

    lease_s, limit_s = seconds("lease"), seconds("solver_limit")
    if lease_s is not None and lease_s <= 0:
        raise InputError(f"{given['lease']!r} is not above 0 s", field="lease")
    return ElasticOptions(
        policy,
        profiles=given.get("profiles"),
        lease_s=lease_s,
        restart_s=seconds("restart_cost"),
        solver_limit_s=1.0 if limit_s is None else limit_s,
        default_profile=given.get("default_profile"),
        trace_gpu=given.get("trace_gpu"),
    )


def run_elastic(
    trace: work.Trace,
    cluster: Cluster,
    options: ElasticOptions,
    out: Path | None = None,
    label: str | None = None,
    more_options: Mapping[str, object] | None = None,
    progress: Callable[[int, int], None] | None = None,
    on_ready: Callable[[], None] | None = None,
) -> tuple[Record, Outcome]:
    """Run the trace to its end under an elastic policy. The record is written to folder `out`, or kept in memory if
    that is None. `on_ready()` is called once the input is valid, before long computations; `progress(finished, jobs)`
    whenever events are written. `more_options` are added to the policy's options in the record. InputError for jobs
    that cannot run on the cluster. If the policy leaves jobs waiting for ever, the outcome's `lacks` says so."""
    trace.require_jobs()
    entry = find_elastic(options.policy)
    profiles, default = profiles_for(options.policy, options.profiles, options.default_profile, trace, cluster)
    tables = build_tables(
        trace, profiles, cluster, rigid=entry.rigid, packs=entry.packs, default_profile=default,
        trace_gpu=options.trace_gpu,
    )  # fmt: skip
    lacking = [name for name, price in zip(tables.models, tables.options.price, strict=True) if np.isnan(price)]
    if entry.needs_price and lacking:
        what = f"policy {options.policy} needs a price of {lacking[0]} in the elastic profiles"
        raise InputError(what, field="policy")
    lease_s = options.lease_s or entry.round_s
    policy = entry.make(options.solver_limit_s)
    chooser = Chooser(tables, policy, lease_s, options.restart_s)
    choice = Choice(FIFO, A_ELASTIC, FEWEST_NODES, True, True)
    if on_ready is not None:
        on_ready()
    warm_up(tables.demand, tables.nodes, choice)
    world = _world(trace.jobs, tables, choice, lease_s, chooser.restart_s, entry.patience)
    info = RunInfo(
        label=label or options.policy,
        seed=trace.seed,
        options={
            "policy": options.policy,
            "profiles": profiles.name,
            "lease_s": lease_s,
            "restart_cost_s": options.restart_s,
            "trace_gpu": options.trace_gpu,
            **(more_options or {}),
        },
        trace={
            "source": trace.source, "jobs": len(trace.jobs), "left_out": trace.left_out, "remarks": trace.remarks,
        },
        cluster=cluster_info(cluster),
    )  # fmt: skip
    work_as_rows = Workload(tables.demand, tables.nodes, tables.base.astype(np.int32), tables.total)
    # elastic profiles state no demand for CPU and memory, so a job can use all that it holds
    unknown = pl.lit(np.nan)
    table = (
        part.with_columns(ideal_cpus=unknown, ideal_memory_bytes=unknown)
        for part in recorded_jobs(trace.jobs, work_as_rows)
    )
    with RecordWriter(out, info, table) as writer:
        started = time.perf_counter()
        window = Window(world, len(trace.jobs))
        run_window(window, chooser.choose, writer, progress)
        engine_s = time.perf_counter() - started
        never = window.unfinished()
        record = writer.close()
    lacks = ""
    if len(never):
        first = trace.jobs.id[never[0]]
        lacks = f"policy {options.policy} left {counted(len(never), 'job')} waiting (first: job {first})"
    return record, Outcome(engine_s, policy.summary(), lacks)


def _world(
    jobs: work.Jobs, tables: ElasticTables, choice: Choice, lease_s: float, restart_s: Floats,
    patience: int,
) -> World:  # fmt: skip
    rows = np.zeros(len(jobs), JOB)
    rows["type"] = tables.base
    rows["arrival_s"] = rows["last_run_s"] = jobs.arrival_s
    rows["priority"] = jobs.priority
    rows["total"] = tables.total
    rows["wanted"] = NOT_RUNNING
    kernel_options = Options(
        lease_s=float(lease_s),
        exact_finish=True,
        whole_iterations=False,
        record_moves=True,
        idle_limit=IDLE_ROUNDS + int(10 * float(restart_s.max()) / lease_s),
        moves_matter=True,
        patience=patience,
    )
    context = JobPolicy().context(np.ones(1), 1.0)
    world = make_world(rows, tables.demand, tables.nodes, choice, context, kernel_options)
    world.run.job["resume_s"] = restart_s
    return world


class Chooser:
    """Keeps what an elastic policy needs to know about each job, and converts the policy's decisions into the form that
    the compiled event loop takes: a demand type and a level for each job, and an order of the jobs (elastic_world.py
    explains types and levels).
    """

    def __init__(self, tables: ElasticTables, policy: ElasticPolicy, lease_s: float, restart_s: float | None) -> None:
        jobs, models = len(tables.base), len(tables.models)
        self.tables, self.policy, self.lease_s = tables, policy, lease_s
        known = np.nan_to_num(tables.restart_s) if restart_s is None else np.full(jobs, restart_s)
        self.restart_s: Floats = known
        self.config = np.full(jobs, NONE)
        self.host = np.full(jobs, NONE)
        self.most = np.zeros(jobs, np.int64)
        self.restarts = np.zeros(jobs, np.int64)
        self.received_s = np.zeros((jobs, models))
        self.attained_s = np.zeros(jobs)

    def choose(self, world: World) -> None:
        """Let the policy decide, and write its decision into the arrays of the compiled event loop."""
        n = int(world.run.counters[C_ACTIVE])
        rows = np.sort(world.run.order[:n])
        view = self._view(world, rows)
        decision = self.policy.decide(view)
        self._apply(world, rows, view, decision)

    def _phase(self, world: World, rows: NDArray[Any]) -> NDArray[np.int64]:
        phases = self.tables.rate.shape[1]
        part = world.jobs["done"][rows] / world.jobs["total"][rows]
        return np.minimum((part * phases).astype(np.int64), phases - 1)

    def _view(self, world: World, rows: NDArray[Any]) -> View:
        tables, jobs = self.tables, world.jobs
        attained = jobs["attained_s"][rows]
        held = self.config[rows]
        ran = held != NONE
        self.received_s[rows[ran], tables.options.gpu[held[ran]]] += (attained - self.attained_s[rows])[ran]
        self.attained_s[rows] = attained
        held = np.where(world.alloc.job["level"][rows] == NOT_RUNNING, NONE, held)
        host = self._present_hosts(world, rows, held)
        now_s = float(world.run.counters[C_TICK]) * self.lease_s
        base = tables.base[rows]
        return View(
            options=tables.options,
            rate=tables.rate[base, self._phase(world, rows)],
            wants=np.array([b.wants for b in tables.bases])[base],
            held=held,
            most=self.most[rows],
            left=jobs["total"][rows] - jobs["done"][rows],
            age_s=now_s - jobs["arrival_s"][rows],
            restarts=self.restarts[rows],
            restart_s=self.restart_s[rows],
            received_s=self.received_s[rows],
            priority=jobs["priority"][rows],
            kind=base,
            job=rows,
            host=host,
            beside=tables.beside,
        )

    def _present_hosts(self, world: World, rows: NDArray[Any], held: Ints) -> Ints:
        """Return for each job the index into `rows` of its host, the job to whose GPU it was added. NONE for a job
        without a host, and if the job or its host has ended or waits.
        """
        hosts = self.host[rows]
        at = np.minimum(np.searchsorted(rows, hosts), len(rows) - 1)
        there = (hosts != NONE) & (rows[at] == hosts) & (held != NONE)
        there &= world.alloc.job["level"][hosts] != NOT_RUNNING
        return np.where(there, at, NONE)

    def _apply(self, world: World, rows: NDArray[Any], view: View, decision: Decision) -> None:
        tables, jobs, run = self.tables, world.jobs, world.run
        config, runs = decision.config, decision.config != NONE
        host = np.full(len(rows), NONE) if decision.host is None else decision.host
        shared = host != NONE
        shared[host[shared]] = True
        stays = keeps_gpu((config == view.held) & runs, view.host, host)
        # running jobs that do not keep their GPUs are marked as not running, so that the event loop places them again
        world.alloc.job["level"][rows[(view.held != NONE) & ~stays]] = NOT_RUNNING
        self.restarts[rows[runs & ~stays & run.job["started"][rows]]] += 1
        self.config[rows] = config
        self.host[rows] = world.scratch.host[rows] = np.where(host == NONE, NONE, rows[host])
        count = np.where(runs, tables.options.count[config], 0)
        self.most[rows] = np.maximum(self.most[rows], count)
        base, phases = tables.base[rows], tables.rate.shape[1]
        jobs["type"][rows] = tables.type_of(base, config, shared)
        mate = host.copy()
        mate[host[host != NONE]] = np.flatnonzero(host != NONE)
        level = self._phase(world, rows) + np.where(mate == NONE, 0, phases * (1 + base[mate]))
        jobs["wanted"][rows] = np.where(runs, level, NOT_RUNNING)
        run.wanted_gpus[0] = float(np.where(shared, 0.5, np.where(runs, count, view.wants)).sum())
        run.order[: len(rows)] = rows[placing_order(runs, count, host, stays, view.host)]


def keeps_gpu(same: NDArray[np.bool_], before: Ints, now: Ints) -> NDArray[np.bool_]:
    """Return which jobs keep their GPUs: those with an unchanged configuration (`same`), except some that share a GPU.
    `before`, `now`: for each job that shares a GPU as the second one (a guest), the job that it shares with (the host);
    NONE otherwise. A guest keeps its GPU only if it already shared with this host and the host keeps its own. When a
    pair separates, the host keeps the GPU if it keeps its configuration; otherwise the guest may."""
    keeps = same.copy()
    keeps[(now != NONE) & (now != before)] = False
    left = (before != NONE) & (now != before)
    keeps[left & keeps[before]] = False
    guests = np.flatnonzero(now != NONE)
    keeps[guests] &= keeps[now[guests]]
    return keeps


def placing_order(runs: NDArray[np.bool_], count: Ints, host: Ints, stays: NDArray[np.bool_], before: Ints) -> Ints:
    """Return the rows in the order in which jobs are placed. In a pair that shares a GPU, the second job directly
    follows the first, its host. The order is:

    1. Pairs whose host keeps a GPU that was already shared. The host takes the same entry of its node's list of shared
       GPUs as before.
    2. Pairs whose host keeps a GPU that was not shared. The host needs an entry that no host of the first group takes.
    3. All other jobs that run, by falling number of GPUs: gangs whose sizes are powers of two then leave no gaps.
    4. Jobs that wait.

    `stays`: which jobs keep their GPUs; `host` and `before`: as `now` and `before` of `keeps_gpu`."""
    rows = np.arange(len(runs))
    place = np.where(host == NONE, rows, host)  # the second job on a GPU is ordered directly after the first
    slot = before != NONE
    slot[before[slot]] = True
    hosts = np.zeros(len(runs), np.bool_)
    hosts[host[host != NONE]] = True
    rank = np.where(hosts & stays, np.where(slot, 0, 1), 2)[place]
    return np.lexsort((host != NONE, place, -count[place], rank, ~runs))
