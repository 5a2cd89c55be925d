"""`cotenant simulate --policy miso`, `static`, ...: a trace of jobs under a partition policy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotenant.core.errors import InputError, unknown_name
from cotenant.sim.partition_options import SHARED, PartitionOptions

if TYPE_CHECKING:
    from cotenant.cli.trace_options import ClusterOptions
    from cotenant.core.record.record import Record
    from cotenant.sim.mig.run import PartitionOutcome
    from cotenant.workloads.trace_options import TraceOptions

Run = tuple["Record", "PartitionOutcome"]


def run_policy(
    spec: str,
    trace_options: TraceOptions,
    cluster_options: ClusterOptions,
    partition_options: PartitionOptions,
    job_options: dict[str, Any],
    *,
    out: Path | None,
    label: str | None,
    quiet: bool,
) -> Run:
    """Read trace and cluster and simulate a partition policy. `job_options`: the values of all options of job policies.
    An option that was given but does not apply to partition policies, as most do not, is refused.
    """
    from cotenant.cli.progress import jobs_progress, say_inputs
    from cotenant.sim.mig.run import cluster_geometry, mig_jobs, named_rules, run_partition
    from cotenant.workloads.jobs.select import load_trace

    policy = str(partition_options.policy)
    for name, value in job_options.items():
        if value not in (None, False) and name not in SHARED:
            option = name.replace("_", "-")
            raise InputError(f"--{option} is for job policies; --policy {policy} does not have it", field=option)
    remarks: list[str] = []
    cluster = cluster_options.parse(remarks, default="1x8")
    options: dict[str, Any] = {
        "default_profile": job_options.get("default_profile"),
        "double_memory": partition_options.double_memory,
        "seed": trace_options.seed,
    }
    geo = cluster_geometry(cluster, double_memory=partition_options.double_memory)
    trace = load_trace(spec, trace_options)
    # wrong input is reported before the simulation starts
    mig_jobs(trace, geo, default_profile=options["default_profile"])
    chosen = {**options, **partition_options.rules(job_options.get("placement"))}
    layout = partition_options.layout or ""
    search = jobs_progress("searching static layouts", len(trace.jobs)) if layout == "best" else nullcontext()
    with search as tick:
        rules, searched = named_rules(trace, cluster, policy, layout=layout, progress=tick, **chosen)

    def say() -> None:
        say_inputs(trace, cluster, remarks)
        for layout, mean in list(searched.items())[:5]:
            print(f"  static {layout}: mean JCT {mean:,.0f} s", file=sys.stderr)

    with jobs_progress(f"simulating {policy}", len(trace.jobs)) as tick:
        return run_partition(
            trace, cluster, rules, out=out, label=label, on_ready=None if quiet else say, progress=tick, **options
        )


def run_others(
    spec: str,
    trace_options: TraceOptions,
    cluster_options: ClusterOptions,
    partition_options: PartitionOptions,
    job_options: dict[str, Any],
) -> list[Run]:
    """Simulate the policies of `--against` on the same input, without writing records. The policy static uses the MIG
    layout with which the mean job completion time is lowest.
    """
    from cotenant.policy.mig.decide import POLICIES

    text = partition_options.against or ""
    names = list(POLICIES) if text == "all" else [n.strip() for n in text.split(",") if n.strip()]
    for name in names:
        if name not in POLICIES:
            raise unknown_name("policy", name, ("all", *POLICIES), "against")
    return [
        run_policy(
            spec,
            trace_options,
            cluster_options,
            replace(partition_options, policy=name, layout="best" if name == "static" else None),
            job_options,
            out=None,
            label=None,
            quiet=True,
        )
        for name in dict.fromkeys(names)
        if name != partition_options.policy
    ]


def ratios(run: Run, others: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Return the mean job completion time of this run divided by that of each other policy. Below 1, this run is
    better.
    """
    from cotenant.core.metrics.summary import summarise

    if not others:
        return {}
    mine = float(summarise(run[0])["jct_s"]["mean"])
    theirs = {record.info.label: float(summarise(record)["jct_s"]["mean"]) for record, _ in others}
    return {label: {"jct_mean_s": mean, "ratio": mine / mean} for label, mean in theirs.items()}
