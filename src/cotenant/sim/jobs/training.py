"""Runs a training simulation from validated options, for the commands `cotenant simulate`, `sweep` and `demo`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cotenant.core.cluster import Cluster
from cotenant.core.errors import InputError
from cotenant.core.record.record import Record
from cotenant.core.work import Trace
from cotenant.policy.jobs.choice import JobPolicy
from cotenant.policy.jobs.demand import runnable_jobs
from cotenant.profiles.training.tables import Profiles, load_profiles
from cotenant.sim.jobs.engine import EngineOptions, Outcome, run_training
from cotenant.sim.jobs.options import TrainingConfig
from cotenant.workloads.jobs.select import gpu_times_in


def policy_of(config: TrainingConfig, profiles: Profiles) -> JobPolicy:
    """Return the job policy that the validated options name."""
    sample: tuple[float, ...] = ()
    if config.gittins_sample:
        try:
            sample = tuple(float(x) for x in gpu_times_in(config.gittins_sample, profiles.iteration_s))
        except InputError as error:
            if error.field != "trace":
                raise
            raise InputError(error.message, file=error.file, line=error.line, field="gittins-sample") from None
    return JobPolicy(
        ordering=config.ordering,
        allotment=config.allotment,
        placement=config.placement,
        sticky=config.is_sticky,
        reserve_after_s=config.reserve_after,
        solver_limit_s=config.solver_limit,
        queue_limits_gpu_s=config.queues,
        gittins_sample_gpu_s=sample,
    )


def engine_options(config: TrainingConfig) -> EngineOptions:
    """Return the options of the training simulator that the validated options contain."""
    return EngineOptions(
        lease_s=config.lease,
        finish=config.finish,
        speeds=config.speeds,
        restart_cost_s=config.restart_cost,
        checkpoint_cost_s=config.checkpoint_cost,
        default_profile=config.default_profile,
        trace_gpu=config.trace_gpu,
        record_placements={"auto": None, "all": True, "no-moves": False}[config.record],
    )


def simulate(
    trace: Trace,
    cluster: Cluster,
    config: TrainingConfig,
    *,
    profiles: Profiles | None = None,
    out: Path | None = None,
    label: str | None = None,
    more_options: dict[str, object] | None = None,
    launch_s: NDArray[np.float64] | None = None,
    progress: Callable[[int, int], None] | None = None,
    on_ready: Callable[[], None] | None = None,
) -> tuple[Record, Outcome]:
    """Run the trace on the cluster with these options. The record is written to folder `out`, or kept in memory.
    `on_ready()` is called once the input is valid, before long computations. `more_options` are added to the policy's
    options in the record (such as the load for which a sweep generated the trace). `launch_s`: for each job, how many
    seconds its first start takes before any work is done."""
    known = profiles or load_profiles(config.profiles)
    policy = policy_of(config, known)
    if config.skip_too_large:
        fits = runnable_jobs(trace.jobs, cluster)
        if not fits.all():
            trace.left_out["larger than the cluster"] = int((~fits).sum())
            trace.jobs = trace.jobs.take(np.flatnonzero(fits))
    more = dict(more_options or {})
    if config.measure is not None:
        first, last = config.measure
        if first >= len(trace.jobs):
            raise InputError(f"begins at job {first:,}; the trace has {len(trace.jobs):,} jobs", field="measure")
        more["measure"] = [first, last]
    options = replace(engine_options(config), launch_s=launch_s)
    return run_training(
        trace, cluster, known, policy, options, out=out, label=label, more_options=more,
        progress=progress, on_ready=on_ready,
    )  # fmt: skip
