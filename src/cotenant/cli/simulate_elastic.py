"""`cotenant simulate --policy sia`, `gavel`, ...: a trace of jobs under an elastic policy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotenant.core.errors import InputError

if TYPE_CHECKING:
    from cotenant.cli.partition_options import PartitionOptions
    from cotenant.cli.trace_options import ClusterOptions
    from cotenant.core.record.record import Record
    from cotenant.sim.jobs.engine import Outcome
    from cotenant.workloads.trace_options import TraceOptions

# options of job policies that elastic policies have, too
TAKEN = ("lease", "restart_cost", "solver_limit", "profiles", "default_profile", "trace_gpu")


def is_elastic(policy: str) -> bool:
    """Whether the policy is one of the elastic ones."""
    from cotenant.policy.elastic.registry import ELASTIC

    return policy in ELASTIC


def run_elastic_policy(
    spec: str,
    trace_options: TraceOptions,
    cluster_options: ClusterOptions,
    partition_options: PartitionOptions,
    job_options: dict[str, Any],
    *,
    out: Path | None,
    label: str | None,
    quiet: bool,
) -> tuple[Record, Outcome]:
    """Read the inputs and simulate. `job_options`: the options of job policies that were given; most do not apply
    here.
    """
    from cotenant.cli.progress import jobs_progress, say_compiling, say_inputs
    from cotenant.core.units import parse_seconds
    from cotenant.policy.elastic.registry import find_elastic
    from cotenant.profiles.training.elastic import load_elastic
    from cotenant.sim.jobs.elastic import ElasticOptions, run_elastic
    from cotenant.workloads.jobs.select import load_trace

    policy = str(partition_options.policy)
    for name, value in job_options.items():
        if value not in (None, False) and name not in TAKEN:
            option = name.replace("_", "-")
            raise InputError(f"--{option} is for job policies; --policy {policy} does not have it", field=option)
    for name in partition_options.given():
        option = name.replace("_", "-")
        raise InputError(f"--{option} is for partition policies; --policy {policy} does not have it", field=option)

    def seconds(name: str) -> float | None:
        text = job_options.get(name)
        return None if text is None else parse_seconds(text, field=name.replace("_", "-"))

    lease_s = seconds("lease")
    if lease_s is not None and lease_s <= 0:
        raise InputError("must be above 0", field="lease")
    limit_s = seconds("solver_limit")
    options = ElasticOptions(
        policy,
        profiles=job_options.get("profiles"),
        lease_s=lease_s,
        restart_s=seconds("restart_cost"),
        solver_limit_s=1.0 if limit_s is None else limit_s,
        default_profile=job_options.get("default_profile"),
        trace_gpu=job_options.get("trace_gpu"),
    )
    known = load_elastic(options.profiles or find_elastic(policy).profiles)
    remarks: list[str] = []
    cluster = cluster_options.parse(remarks, default="16x8")
    trace = load_trace(spec, trace_options, classes=known.classes, lengths=False)

    def say() -> None:
        if not quiet:
            say_inputs(trace, cluster, remarks)
        say_compiling()

    with jobs_progress(f"simulating {policy}", len(trace.jobs)) as tick:
        return run_elastic(trace, cluster, options, out=out, label=label, progress=tick, on_ready=say)
