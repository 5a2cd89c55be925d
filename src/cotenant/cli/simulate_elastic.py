"""`cotenant simulate --policy sia`, `gavel`, ...: a trace of jobs under an elastic policy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotenant.core.errors import InputError

if TYPE_CHECKING:
    from cotenant.cli.trace_options import ClusterOptions
    from cotenant.core.record.record import Record
    from cotenant.sim.jobs.engine import Outcome
    from cotenant.sim.partition_options import PartitionOptions
    from cotenant.workloads.trace_options import TraceOptions


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
    """Read trace and cluster and simulate an elastic policy. `job_options`: the values of all options of job policies.
    An option that was given but does not apply to elastic policies, as most do not, is refused.
    """
    from cotenant.cli.progress import jobs_progress, say_compiling, say_inputs
    from cotenant.sim.jobs.elastic import elastic_options, run_elastic
    from cotenant.sim.jobs.elastic_models import classes_for, needs_no_models
    from cotenant.workloads.jobs.select import load_trace

    policy = str(partition_options.policy)
    for name in partition_options.given():
        option = name.replace("_", "-")
        raise InputError(f"--{option} is for partition policies; --policy {policy} does not have it", field=option)
    given = {name: value for name, value in job_options.items() if value not in (None, False)}
    options = elastic_options(policy, given)
    chosen = (policy, options.profiles, options.default_profile)
    classes = classes_for(*chosen, split=bool(trace_options.split))
    remarks: list[str] = []
    cluster = cluster_options.parse(remarks, default="16x8")
    trace = load_trace(spec, trace_options, classes=classes, lengths=False, named_gpus=needs_no_models(*chosen))

    def say() -> None:
        if not quiet:
            say_inputs(trace, cluster, remarks)
        say_compiling()

    with jobs_progress(f"simulating {policy}", len(trace.jobs)) as tick:
        return run_elastic(trace, cluster, options, out=out, label=label, progress=tick, on_ready=say)
