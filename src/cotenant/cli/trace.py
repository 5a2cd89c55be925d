"""`cotenant trace`: inspect, convert and generate traces."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.trace_options import ClusterOptions, takes_cluster_options, takes_trace_options
from cotenant.workloads.trace_options import DEFAULT_SEED, DEFAULT_SPLIT, TraceOptions

if TYPE_CHECKING:
    from cotenant.core.work import Trace

app = typer.Typer(no_args_is_help=True, help="Inspect, convert and generate traces.")

Spec = Annotated[str, typer.Argument(metavar="FORMAT:PATH", help="native, synergy, philly, philly-json, chronus, ...")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Out = Annotated[str, typer.Option("--out", help="File to write in native format: F.csv or F.parquet.")]
Text = str | None


def _load(spec: str, options: TraceOptions, *, lengths: bool = True) -> tuple[Trace, dict[str, float]]:
    """Return the trace, and the iteration times of the built-in profiles. With `--split` (the shares of image, language
    and speech models) the jobs are given models by these shares; without it they have the models that the trace states.
    """
    from cotenant.profiles.training.tables import load_profiles
    from cotenant.workloads.jobs.select import load_trace

    profiles = load_profiles()
    classes = profiles.classes if options.split else None
    trace = load_trace(spec, options, classes=classes, iteration_s=profiles.iteration_s, lengths=lengths)
    return trace, profiles.iteration_s


@app.command()
@takes_trace_options
def inspect(spec: Spec, as_json: Json = False, *, trace_options: TraceOptions) -> None:
    """Describe a trace: rows kept and left out, time span, GPU counts, durations, models, tenants."""
    from cotenant.workloads.jobs.summary import summarise

    trace, iteration_s = _load(spec, trace_options, lengths=False)
    summary = summarise(trace, iteration_s)
    if as_json:
        print(json.dumps(summary))
        return
    from cotenant.cli.trace_view import show_summary
    from cotenant.profiles.training.elastic import SHIPPED, load_elastic

    models = set(trace.jobs.model.tolist())
    show_summary(summary, [name for name in SHIPPED if models <= set(load_elastic(name).models)])


@app.command()
@takes_trace_options
def convert(spec: Spec, out: Out, as_json: Json = False, *, trace_options: TraceOptions) -> None:
    """Write any trace in native format, after the requested filters and replacements."""
    from cotenant.workloads.jobs.write import check_native_name, write_native

    check_native_name(out)
    found: list[Trace] = []

    def jobs() -> Any:
        found.append(_load(spec, trace_options)[0])
        return found[0].jobs

    write_native(out, jobs)
    trace = found[0]
    content = {
        "out": out,
        "jobs": len(trace.jobs),
        "left_out": trace.left_out,
        "remarks": trace.remarks,
        "seed": trace.seed,
    }
    _say_written(content, as_json)


def _say_written(content: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(content))
        return
    from cotenant.cli.trace_view import show_written

    show_written(content)


@app.command()
@takes_cluster_options
def generate(
    jobs: Annotated[int, typer.Option("--jobs", help="Number of jobs.")],
    out: Annotated[
        Text, typer.Option("--out", help="File to write, F.csv or F.parquet (default: CSV on standard output).")
    ] = None,
    like: Annotated[
        str, typer.Option("--like", help="Preset for other options: synergy, gavel, sia, miso, philly, fleet-smoke.")
    ] = "synergy",
    rate: Annotated[Text, typer.Option("--rate", help="Mean arrival rate: 8/h.")] = None,
    gap: Annotated[Text, typer.Option("--gap", help="Mean time between arrivals instead of a rate: 100s.")] = None,
    load: Annotated[Text, typer.Option("--load", help="Offered GPU-time relative to --cluster: 0.9 or 90%.")] = None,
    arrivals: Annotated[
        Text,
        typer.Option("--arrivals", help="poisson, static, bursty:CV, lognormal:CV, hyperexp:..., trace:FORMAT:PATH."),
    ] = None,
    durations: Annotated[
        Text,
        typer.Option("--durations", help="two-part, two-part-short, lognormal:MEDIAN:SIGMA, trace:FORMAT:PATH."),
    ] = None,
    gpu_mix: Annotated[Text, typer.Option("--gpu-mix", help="GPU counts with weights: 1:70,2:10,4:15,8:5.")] = None,
    split: Annotated[
        Text, typer.Option("--split", help=f"Shares of image,language,speech models. Default {DEFAULT_SPLIT}.")
    ] = None,
    split_mode: Annotated[
        str, typer.Option("--split-mode", help="overall (round robin, not random) or random (by the seed).")
    ] = "overall",
    seed: Annotated[int, typer.Option("--seed", help="Seed; the same seed gives the same file.")] = DEFAULT_SEED,
    as_json: Json = False,
    *,
    cluster_options: ClusterOptions,
) -> None:
    """Draw a synthetic trace and write it in native format."""
    from cotenant.core.errors import InputError
    from cotenant.core.units import parse_fraction, parse_rate_per_s, parse_seconds
    from cotenant.profiles.training.tables import load_profiles
    from cotenant.workloads.jobs.generate import MAX_LOAD, Generated, Workload
    from cotenant.workloads.jobs.generate import generate as draw
    from cotenant.workloads.jobs.write import check_native_name, write_native

    if out is not None:
        check_native_name(out)
    elif as_json:
        raise InputError("--json needs --out: without --out the trace goes to standard output", field="out")
    if gap is not None and rate is not None:
        raise InputError("give --rate or --gap, not both", field="gap")
    pace = parse_rate_per_s(rate, field="rate") if rate is not None else None
    if gap is not None:
        gap_s = parse_seconds(gap, field="gap")
        if gap_s <= 0:
            raise InputError("the gap must be above 0, such as 100s", field="gap")
        pace = 1.0 / gap_s
    remarks: list[str] = []
    cluster = cluster_options.parse(remarks) if cluster_options.cluster else None
    workload = Workload(
        jobs=jobs,
        like=like,
        rate_per_s=pace,
        load=parse_fraction(load, field="load", most=MAX_LOAD) if load is not None else None,
        cluster_gpus=cluster.total_gpus if cluster else None,
        arrivals=arrivals or "",
        durations=durations or "",
        gpu_mix=gpu_mix or "",
        split=split or "",
        split_mode=split_mode,
        seed=seed,
    )
    profiles = load_profiles()
    made: list[Generated] = []

    def make() -> Any:
        made.append(draw(workload, profiles.classes, profiles.iteration_s))
        return made[0].trace.jobs

    if out is None:
        from cotenant.workloads.jobs.write import native_frame

        sys.stdout.write(native_frame(make()).write_csv())
        return
    write_native(out, make)
    _say_written({"out": out, **made[0].summary(workload.cluster_gpus), "remarks": remarks}, as_json)
