"""`cotenant simulate`: a trace of jobs on a cluster, in virtual time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.added_options import Command, Options, with_options
from cotenant.cli.partition_options import takes_partition_options
from cotenant.cli.trace_options import ClusterOptions, takes_cluster_options, takes_trace_options
from cotenant.core.files import atomic_file, check_folder, check_writable
from cotenant.sim.partition_options import PartitionOptions
from cotenant.workloads.trace_options import TraceOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotenant.core.record.record import Record
    from cotenant.sim.jobs.engine import Outcome
    from cotenant.sim.jobs.options import TrainingConfig
    from cotenant.sim.mig.run import PartitionOutcome

app = typer.Typer(add_completion=False)
POLICY = "Policy (see cotenant policies)"
ENGINE = "Engine"
Text = str | None

POLICY_OPTIONS: Options = {
    "ordering": (Text, None, "fifo, srtf, las, ftf, ... Default fifo."),
    "allotment": (Text, None, "proportional, greedy, tune (default), optimal."),
    "placement": (Text, None, "first-fit (default), consolidate, spread."),
    "sticky": (bool | None, None, "Running jobs keep their GPUs (default: if moving costs time)."),
    "reserve_after": (Text, None, "Jobs that waited longer than this go first: 24h."),
    "queues": (Text, None, "Ordering las-queues: limits in GPU-time (default: 1h,10h)."),
    "gittins_sample": (Text, None, "Ordering gittins: trace that supplies the distribution of GPU-times."),
    "solver_limit": (Text, None, "optimal, sia: time limit of the solver per decision (default: 1s)."),
}
# options that have an effect only under one ordering or allotment
EFFECTIVE = (
    ("queues", "ordering", "las-queues"),
    ("gittins_sample", "ordering", "gittins"),
    ("solver_limit", "allotment", "optimal"),
)
ENGINE_OPTIONS: Options = {
    "speeds": (Text, None, "Speed model: matrix (profile table, default) or two-speed."),
    "lease": (Text, None, "Length of a scheduling round (default: 300s; sia: 60s)."),
    "finish": (Text, None, "When a job's end takes effect: exact (default) or lease-end."),
    "restart_cost": (Text, None, "Time that resuming or moving a job takes: 30s."),
    "checkpoint_cost": (Text, None, "Progress after its last checkpoint that a job loses when resumed or moved: 1min."),
    "profiles": (Text, None, "Profile file (default: the built-in profiles)."),
    "default_profile": (Text, None, "Profile for models that have none of their own."),
    "trace_gpu": (Text, None, "GPU model on which the trace's times were measured (default: the cluster's first)."),
    "skip_too_large": (bool, False, "Leave out jobs that are larger than the cluster."),
    "measure": (Text, None, "Compute figures over jobs FROM-TO by arrival, 4000-5000 (default: all jobs)."),
    "record": (Text, None, "Events to record: all, no-moves (smaller) or auto (no-moves above 20,000 jobs; default)."),
}


def takes_job_options(command: Command) -> Command:
    """Decorator that adds the options of job policies and of the engine, which the command receives as `given`."""
    return with_options(command, {POLICY: POLICY_OPTIONS, ENGINE: ENGINE_OPTIONS}, "given", dict)


@app.command()
@takes_trace_options
@takes_cluster_options
@takes_partition_options
@takes_job_options
def simulate(
    trace: Annotated[Text, typer.Option("--trace", help="FORMAT:PATH; see docs/traces.md.", metavar="SPEC")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the run's record.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a self-contained HTML report.")] = None,
    jct_csv: Annotated[Path | None, typer.Option("--jct-csv", help="Write a CSV with the columns job,jct_s.")] = None,
    label: Annotated[Text, typer.Option("--label", help="Name of the run in tables and charts.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    *,
    trace_options: TraceOptions,
    cluster_options: ClusterOptions,
    partition_options: PartitionOptions,
    given: dict[str, Any],
) -> None:
    """Simulate a trace of jobs on a cluster in virtual time and print the figures.

    With SERVICES.yaml as first argument: requests on a serving plan, see cotenant simulate SERVICES.yaml --help.
    With --serving MODELS.yaml: language models, see cotenant simulate --serving --help. With --agent FILE: tenants
    that share one GPU, see cotenant simulate --agent FILE --help.
    """
    from cotenant.core.errors import InputError, WorkError
    from cotenant.sim.jobs.options import training_config

    if trace is None:
        raise InputError("give a trace, such as --trace philly:jobs.csv", field="trace")
    if partition_options.policy is not None:
        from cotenant.cli.simulate_elastic import is_elastic, run_elastic_policy
        from cotenant.cli.simulate_partition import ratios, run_others, run_policy
        from cotenant.policy.names import check_policy

        check_policy(partition_options.policy)
        check_outputs(out, html, jct_csv)
        if is_elastic(partition_options.policy):
            ran = run_elastic_policy(
                trace, trace_options, cluster_options, partition_options, given, out=out, label=label, quiet=json_
            )
            finish_up(*ran, html=html, jct_csv=jct_csv, json_=json_)
            if ran[1].lacks:
                raise WorkError(ran[1].lacks)
            return
        others = run_others(trace, trace_options, cluster_options, partition_options, given)
        result, done = run_policy(
            trace, trace_options, cluster_options, partition_options, given, out=out, label=label, quiet=json_
        )
        against = ratios((result, done), others)
        extra = done.extra() | ({"against": against} if others else {})
        beside = [record for record, _ in others]
        finish_up(result, done, html=html, jct_csv=jct_csv, json_=json_, extra=extra, beside=beside)
        return
    if partition_options.given():
        option = partition_options.given()[0].replace("_", "-")
        raise InputError("needs a --policy, such as --policy miso", field=option)
    config = training_config({name: value for name, value in given.items() if value is not None})
    for option, kind, needed in EFFECTIVE:
        if given.get(option) is not None and getattr(config, kind) != needed:
            what = f"has no effect under {kind} {getattr(config, kind)}; it is for --{kind} {needed}"
            raise InputError(what, field=option.replace("_", "-"))
    check_outputs(out, html, jct_csv)
    result, outcome = run(trace, trace_options, cluster_options, config, out=out, label=label, quiet=json_)
    finish_up(result, outcome, html=html, jct_csv=jct_csv, json_=json_)


def check_outputs(out: Path | None, *files: Path | None, holds: str = "run.json") -> None:
    """Check before the simulation that the results can be written. `holds`: name of a file; a folder that contains it
    may be replaced or extended.
    """
    check_writable(*files)
    if out is not None:
        check_folder(out, holds)


def run(
    spec: str,
    trace_options: TraceOptions,
    cluster_options: ClusterOptions,
    config: TrainingConfig,
    *,
    out: Path | None,
    label: str | None,
    quiet: bool,
) -> tuple[Record, Outcome]:
    """Read trace and cluster and simulate a job policy, with progress on a terminal; remarks go to standard error."""
    from cotenant.profiles.training.tables import load_profiles
    from cotenant.sim.jobs.training import policy_of
    from cotenant.workloads.jobs.select import load_trace

    profiles = load_profiles(config.profiles)
    policy_of(config, profiles)  # a wrong policy name is reported before a file is read, which may take long
    remarks: list[str] = []
    cluster = cluster_options.parse(remarks, default="16x8")
    trace = load_trace(spec, trace_options, classes=profiles.classes, iteration_s=profiles.iteration_s)
    if config.trace_gpu is None and (cluster_options.gpu or len(cluster.gpu_models) > 1):
        remarks.append(
            f"the trace's times are assumed to be those of {cluster.gpu_models[0]}; --trace-gpu MODEL names another"
        )
    from cotenant.cli.progress import jobs_progress, say_compiling, say_inputs
    from cotenant.sim.jobs.training import simulate as simulate_training

    def say() -> None:
        if not quiet:
            say_inputs(trace, cluster, remarks)
        say_compiling()

    with jobs_progress("simulating", len(trace.jobs)) as tick:
        return simulate_training(
            trace, cluster, config, profiles=profiles, out=out, label=label, progress=tick, on_ready=say
        )


def finish_up(
    record: Record,
    outcome: Outcome | PartitionOutcome,
    *,
    html: Path | None,
    jct_csv: Path | None,
    json_: bool,
    extra: dict[str, Any] | None = None,
    beside: Sequence[Record] = (),
) -> None:
    """Print the figures of a finished run, and write the files `html` (a report page) and `jct_csv` if they are given.
    The printed table and the page also show the runs in `beside`, for comparison."""
    from cotenant.core.metrics.summary import Analysis
    from cotenant.core.units import counted

    analysis = Analysis(record)
    summary = {**analysis.summary, "engine_s": outcome.engine_s, "seed": record.info.seed, **(extra or {})}
    if outcome.solver:
        summary["solver"] = outcome.solver
    if jct_csv is not None:
        write_jct(record, analysis.jobs.jct_s, jct_csv)
    if html is not None:
        from cotenant.profiles.training.tables import load_profiles
        from cotenant.report.page import write_page
        from cotenant.report.runs import arrange, run_of

        families = {model.name: model.family for model in load_profiles().models.values()}
        write_page(html, arrange([run_of(r, families) for r in (record, *beside)]), record.info.label)
    if json_:
        import orjson

        sys.stdout.write(orjson.dumps(summary).decode() + "\n")
        return
    from cotenant.report.runs import energy_note, moves_note
    from cotenant.report.table import print_runs

    both = [(record.info, summary), *((r.info, Analysis(r).summary) for r in beside)]
    labelled = [(info.label, figures) for info, figures in both]
    print_runs(labelled, moves_note=moves_note(both), energy_note=energy_note(both))
    for name, value in summary.get("against", {}).items():
        typer.echo(f"mean JCT is {value['ratio']:.3f} times that of {name}")
    solver = outcome.solver
    gap = f"largest gap to the optimum {solver['worst_gap']:.2%}" if solver else ""
    typer.echo(
        f"{counted(summary['rounds'], 'round')} in {outcome.engine_s:.3g} s"
        + (f"; {counted(solver['solves'], 'optimization problem')} solved, {gap}" if solver else "")
    )
    for path in (html, jct_csv):
        if path is not None:
            typer.echo(f"wrote {path}")


def write_jct(record: Record, jct_s: Any, path: Path) -> None:
    """Write a CSV file with the columns job,jct_s and one row per job, in the order of the trace. `jct_s` is empty for
    a job that did not finish.
    """
    import csv
    import math

    ids = record.jobs["id"].to_list()
    with atomic_file(path) as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("job", "jct_s"))
        for name, value in zip(ids, jct_s.tolist(), strict=True):
            table.writerow((name, "" if math.isnan(value) else format_number(value)))


def format_number(value: float) -> str:
    """Format a number: integers without a decimal point, other numbers in full precision."""
    return str(int(value)) if value == int(value) else repr(value)
