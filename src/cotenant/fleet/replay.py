"""Runs a trace in real time by pretended jobs, and simulates the same trace with profiles measured from those jobs.

The steps of a pretended job only wait for as long as a profile says. The smaller the differences between the two
records, the more faithful is the simulator.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cotenant.core.cluster import Cluster
from cotenant.core.errors import InputError, WorkError
from cotenant.core.events import Kind
from cotenant.core.extras import needs
from cotenant.core.metrics.summary import Analysis
from cotenant.core.record.record import Record
from cotenant.core.temporary import temporary_folder
from cotenant.core.work import Floats, Jobs, Trace
from cotenant.fleet.controller.planners import cluster_of
from cotenant.fleet.jobs import JobSpec
from cotenant.fleet.session import Fleet, FleetOptions, node_specs
from cotenant.policy.jobs.choice import JobPolicy
from cotenant.policy.jobs.demand import build_workload
from cotenant.profiles.training.job_runs import JobRuns
from cotenant.profiles.training.optimistic import CpuPoint, sweep
from cotenant.profiles.training.tables import ModelProfile, Profiles, load_profiles
from cotenant.sim.jobs.options import TrainingConfig
from cotenant.sim.jobs.training import simulate
from cotenant.training.timed import steps_per_iteration

with needs("fleet"):
    import numpy as np
    from numpy.typing import NDArray

PATIENCE = 5.0  # a run that takes this many times its simulated time has failed
OFF = 0.03  # if the measured speed of a pretended job differs from its target by more than this, it is measured again
TRIES = 3


@dataclass(frozen=True)
class ReplayOptions:
    """Options of a replay. With a `time_scale` of 0.1, jobs and the gaps between arrivals are a tenth as long as in the
    trace; `lease_s` is not scaled. `profile`: file with the target speeds of pretended jobs. `torch_jobs`: number of
    jobs that really train a small PyTorch model.
    """

    ordering: str = "fifo"
    allotment: str = "tune"
    placement: str = "first-fit"
    sticky: bool | None = None
    lease_s: float = 10.0
    nodes: int = 4
    gpus_per_node: int = 2
    cpus_per_node: float | None = None
    memory_per_node: int | None = None
    executor: str = "local"
    address: str | None = None
    time_scale: float = 1.0
    torch_jobs: int = 0
    profile: str | None = None


@dataclass(frozen=True)
class Outcome:
    """Both records and their differences. Times in seconds; errors are fractions.

    `mean_error`: of the mean JCT, measured / simulated - 1. `p90_job_error`: 90th percentile over jobs of |measured /
    simulated - 1|. `start_s`: median cost of a start, taken from the measured run and used in the simulated one.
    `pace_error`: the largest |measured / target - 1| of the profiles' speeds.
    """

    measured: Record
    simulated: Record
    start_s: float
    pace_error: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Return the result of the replay as `--json` prints it."""
        real, model = (Analysis(record) for record in (self.measured, self.simulated))
        jct, expected = real.jobs.jct_s, model.jobs.jct_s
        error = np.abs(jct / expected - 1)
        worst = int(np.argmax(error))
        return {
            "jobs": len(jct),
            "measured_mean_jct_s": float(jct.mean()),
            "simulated_mean_jct_s": float(expected.mean()),
            "mean_error": float(jct.mean() / expected.mean() - 1),
            "p90_job_error": float(np.quantile(error, 0.9)),
            "median_job_error": float(np.median(error)),
            "worst_job": {"job": str(self.measured.job("id")[worst]), "error": float(error[worst])},
            "measured_makespan_s": float(real.jobs.finish_s.max()),
            "simulated_makespan_s": float(model.jobs.finish_s.max()),
            "measured_preemptions": int(real.jobs.preemptions.sum()),
            "simulated_preemptions": int(model.jobs.preemptions.sum()),
            "start_s": self.start_s,
            "pace_error": self.pace_error,
        }

    def doubts(self) -> list[str]:
        """Return reasons why differences between the two records may come from this machine instead of the simulator.
        """
        if self.pace_error <= OFF:
            return []
        return [
            f"pretended jobs ran up to {self.pace_error:.0%} off their target speed, {TRIES} times in a "
            "row: this machine was busy, or the jobs' steps are too short for it; repeat the replay on an "
            "idle machine"
        ]


def replay(
    trace: Trace,
    options: ReplayOptions,
    *,
    out: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Run the trace in real time and simulate it; records go to `out`/measured and `out`/simulated.

    Raises InputError for a trace that the cluster cannot hold, WorkError if a job fails.
    """
    told = load_profiles(options.profile)
    with temporary_folder("replay") as folder:
        fleet = _options(options, folder / "fleet", told)
        cluster = cluster_of(node_specs(fleet))
        jobs = whole_iterations(trace.require_jobs(), cluster, told, options.time_scale)
        known, pace_error = measure_profiles(jobs, options, cluster, say)
        free = _simulated(trace, jobs, options, cluster, known, np.zeros(len(jobs)), None)
        longest = float(Analysis(free).jobs.finish_s.max())
        say(f"simulated: {longest:.0f} s until the last job ends; now in real time")
        measured = _run(replace(fleet, profiles=known), jobs, options, longest * PATIENCE + 60, out, progress)
        costs = start_costs_s(measured, options.lease_s, _torch_rows(jobs, options))
        model = _simulated(trace, jobs, options, cluster, known, costs, out)
    return Outcome(measured, model, float(np.median(costs)), pace_error)


def start_costs_s(record: Record, lease_s: float, heavy: NDArray[np.bool_]) -> Floats:
    """Return for each job the cost of one start, in seconds. It is the sum of two times. The first is the time from the
    round that decides the start until the processes run; it is the median over all starts of all jobs. The second is
    the time per start for which a job holds its GPUs in addition to its work. For `heavy` jobs, whose starts are long
    because they load PyTorch, the second time is the median over the `heavy` jobs; for the other jobs it is the median
    over the other jobs.
    """
    timeline, events = Analysis(record).timeline, record.events
    starts = (events.kind == Kind.START) | (events.kind == Kind.RESUME)
    n = record.jobs.height
    held_s = np.bincount(events.job, weights=timeline.length_s * timeline.holding, minlength=n)
    worked_s = np.bincount(events.job, weights=timeline.length_s * timeline.holding * events.speed, minlength=n)
    count = np.bincount(events.job[starts], minlength=n)
    speed = worked_s / np.maximum(held_s, 1e-9)
    beyond_s = (worked_s - record.job("isolated_s")) / np.maximum(speed, 1e-9) / np.maximum(count, 1)
    costs = np.full(n, float(np.median(np.mod(events.time_s[starts], lease_s))))
    for group in (heavy, ~heavy):
        if (group & (count > 0)).any():
            costs[group] += max(0.0, float(np.median(beyond_s[group & (count > 0)])))
    return costs


def whole_iterations(trace: Trace, cluster: Cluster, profiles: Profiles, time_scale: float) -> Jobs:
    """The trace's jobs with their work as a whole number of iterations of their profiles, and scaled arrival times."""
    work = build_workload(trace.jobs, profiles, cluster, trace=trace)
    jobs = trace.jobs.take(np.arange(len(trace.jobs)))
    jobs.iterations = np.maximum(1.0, np.round(work.iterations))
    jobs.duration_s = np.full(len(jobs), np.nan)
    jobs.arrival_s = jobs.arrival_s * time_scale
    if (jobs.gpus < 1).any():
        raise InputError(
            "jobs on fractions of a GPU cannot be replayed by pretended jobs", file=trace.source, field="gpus"
        )
    return jobs


# ---- measurements before the run


def measure_profiles(
    jobs: Jobs, options: ReplayOptions, cluster: Cluster, say: Callable[[str], None] = lambda text: None
) -> tuple[Profiles, float]:
    """Measure a profile for each of the jobs' models, by runs with few and with many cores. The runs are of a program
    that does no work, and whose steps should take as long as the given profile says. Returns the profiles, and the
    largest error |measured / due - 1| of a step's time.
    """
    most = max(int(group.cpus) for group in cluster.groups)
    memory_bytes = min(group.memory_bytes // group.gpus for group in cluster.groups)
    told = load_profiles(options.profile)
    raw: dict[str, Any] = {"cpus_per_gpu": None, "memory_gb_per_gpu": [1.0], "models": {}}
    grids: dict[str, list[CpuPoint]] = {}
    errors: list[float] = []
    for model in sorted(set(jobs.model.tolist())):
        command = timed_command(options, model, 1e9)
        runs = JobRuns(command, memory_bytes=memory_bytes, warm=2, steps=12, pretend=True)
        pace, parts = told.models[model], _parts(told, model, options.time_scale)

        def measure(cpus: int, runs: JobRuns = runs, pace: ModelProfile = pace, parts: int = parts) -> float:
            due_s = pace.iteration_s * options.time_scale / pace.speed(cpus, memory_bytes / 1e9) / parts
            step_s, error = steadied(lambda: runs.step_s(cpus), due_s)
            errors.append(error)
            return step_s

        grids[model] = sweep(measure, 1, most, 1, 6)
        say(f"measured {model}: {len(grids[model])} runs")
    axis = sorted({point.cpus for points in grids.values() for point in points})
    raw["cpus_per_gpu"] = axis
    for model, points in grids.items():
        parts = _parts(told, model, options.time_scale)
        seconds = 1 / np.interp(axis, [p.cpus for p in points], [1 / (p.step_s * parts) for p in points])
        base = float(seconds[-1])
        raw["models"][model] = {
            "class": told.models[model].family,
            "iteration_s": base,
            "throughput": (base / seconds)[:, None].tolist(),
            "multi_node_factor": told.models[model].multi_node_factor,
        }
    with temporary_folder("replay") as folder:
        (folder / "profiles.json").write_text(json.dumps({"name": "measured"} | raw))
        return load_profiles(folder / "profiles.json"), max(errors)


def steadied(measure: Callable[[], float], due_s: float) -> tuple[float, float]:
    """Measure a pretended job: (measured seconds, |measured / due - 1|). A measurement that deviates by more than OFF
    is repeated, up to TRIES times in all; if all deviate, the median counts.
    """
    found: list[float] = []
    for _ in range(TRIES):
        found.append(measure())
        if abs(found[-1] / due_s - 1) <= OFF:
            return found[-1], abs(found[-1] / due_s - 1)
    middle = float(np.median(found))
    return middle, abs(middle / due_s - 1)


# ---- the two runs


def _simulated(
    trace: Trace, jobs: Jobs, options: ReplayOptions, cluster: Cluster, profiles: Profiles, start_s: Floats,
    out: Path | None,
) -> Record:  # fmt: skip
    """Simulate the jobs of the trace. The first start of a job costs the job's own entry in `start_s` (seconds). Each
    later start costs the median of `start_s`.
    """
    config = TrainingConfig(
        ordering=options.ordering, allotment=options.allotment, placement=options.placement, sticky=options.sticky,
        lease=options.lease_s, restart_cost=float(np.median(start_s)),
    )  # fmt: skip
    own = jobs.take(np.arange(len(jobs)))
    simulated = Trace(own, trace.source, dict(trace.left_out), list(trace.remarks), trace.seed)
    record, _ = simulate(
        simulated, cluster, config, profiles=profiles, out=None if out is None else out / "simulated",
        label=f"{options.ordering} + {options.allotment} (simulated)", launch_s=start_s,
    )  # fmt: skip
    return record


def _run(
    fleet: FleetOptions, jobs: Jobs, options: ReplayOptions, patience_s: float, out: Path | None,
    progress: Callable[[int, int], None] | None,
) -> Record:  # fmt: skip
    torch_rows = _torch_rows(jobs, options)
    specs = [_spec(jobs, row, options, torch=bool(torch_rows[row])) for row in range(len(jobs))]
    with Fleet(fleet) as session:
        session.submit_all(specs, jobs.arrival_s.tolist())
        session.begin()
        waited = 0.0
        while not session.wait(1.0):
            waited += 1.0
            if progress is not None:
                progress(len(specs) - len(session.queue(everything=False)), len(specs))
            if waited > patience_s:
                raise WorkError(f"the jobs had not finished after {patience_s:.0f} s")
        failed = [row["id"] for row in session.queue() if row["state"] != "finished"]
        if failed:
            raise WorkError(f"{len(failed)} jobs failed, the first of them is {failed[0]}")
        return session.record(None if out is None else out / "measured")


def _torch_rows(jobs: Jobs, options: ReplayOptions) -> NDArray[np.bool_]:
    """Which jobs train in PyTorch: the first `torch_jobs` jobs with a single GPU."""
    chosen = np.zeros(len(jobs), dtype=np.bool_)
    chosen[np.flatnonzero(jobs.gpus == 1)[: options.torch_jobs]] = True
    return chosen


def _spec(jobs: Jobs, row: int, options: ReplayOptions, *, torch: bool) -> JobSpec:
    def stated(value: float) -> float | None:
        return None if np.isnan(value) else float(value)

    gpus, model = float(jobs.gpus[row]), str(jobs.model[row])
    memory = stated(jobs.memory_bytes[row])
    return JobSpec(
        name=f"job-{jobs.id[row]}"[:60],
        command=timed_command(options, model, float(jobs.iterations[row]), torch=torch),
        gpus=gpus,
        cpus=stated(jobs.cpus[row]),
        memory_bytes=None if memory is None else int(memory),
        model=model,
        iterations=float(jobs.iterations[row]),
        priority=int(jobs.priority[row]),
        tenant=str(jobs.tenant[row]),
        processes="node",
    )


def timed_command(options: ReplayOptions, model: str, iterations: float, *, torch: bool = False) -> tuple[str, ...]:
    """Return the command of the job that stands for a model in the replay."""
    from importlib import resources

    shipped = resources.files("cotenant.profiles").joinpath("data/synergy.json")
    return (
        sys.executable, "-m", "cotenant.training.timed", "--profile", options.profile or str(shipped), "--model", model,
        "--iterations", f"{iterations:.0f}", "--time-scale", repr(options.time_scale),
        *(("--torch",) if torch else ()),
    )  # fmt: skip


def _options(options: ReplayOptions, folder: Path, profiles: Profiles) -> FleetOptions:
    # `restart_cost` only decides `is_sticky`: a restart takes time here, so running jobs keep their GPUs unless the
    # option `sticky` says otherwise
    chosen = TrainingConfig(sticky=options.sticky, restart_cost=1.0)
    return FleetOptions(
        folder=folder,
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        cpus_per_node=options.cpus_per_node,
        memory_per_node=options.memory_per_node,
        executor=options.executor,
        address=options.address,
        lease_s=options.lease_s,
        early=False,
        autostart=False,
        policy=JobPolicy(options.ordering, options.allotment, options.placement, chosen.is_sticky),
        profiles=profiles,
    )


def _parts(profiles: Profiles, model: str, time_scale: float) -> int:
    return steps_per_iteration(profiles.iteration_s[model] * time_scale)
