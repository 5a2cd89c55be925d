"""`cotenant fleet replay`: run a trace in real time with pretended jobs and compare it with its simulation."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cotenant.cli.trace_options import takes_trace_options
from cotenant.workloads.trace_options import TraceOptions

if TYPE_CHECKING:
    from cotenant.fleet.replay import ReplayOptions

Text = str | None


@takes_trace_options
def replay(
    trace: Annotated[
        str, typer.Argument(metavar="FORMAT:PATH", help="Trace with jobs of seconds to minutes on whole GPUs.")
    ],
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Pretend nodes.")] = 4,
    gpus: Annotated[int, typer.Option("--gpus-per-node", min=1, help="Pretended GPUs per node.")] = 2,
    cpus: Annotated[float | None, typer.Option("--cpus-per-node", help="Cores per node (default: 3 per GPU).")] = None,
    memory: Annotated[
        Text, typer.Option("--memory-per-node", help="Memory per node (default: 62.5GB per GPU).")
    ] = None,
    ordering: Annotated[str, typer.Option("--ordering", help="fifo, srtf, las, ...")] = "fifo",
    allotment: Annotated[str, typer.Option("--allotment", help="proportional, greedy, tune, optimal.")] = "tune",
    placement: Annotated[str, typer.Option("--placement", help="first-fit, consolidate, spread.")] = "first-fit",
    sticky: Annotated[
        bool | None, typer.Option("--sticky/--no-sticky", help="Running jobs keep their GPUs (default).")
    ] = None,
    lease: Annotated[str, typer.Option("--lease", help="Length of a scheduling round.")] = "10s",
    time_scale: Annotated[
        float, typer.Option("--time-scale", help="Factor on durations and gaps: 0.1 makes them a tenth of the trace's.")
    ] = 1.0,
    executor: Annotated[str, typer.Option("--executor", help="local or ray.")] = "local",
    address: Annotated[Text, typer.Option("--address", help="Ray cluster to use (default: start one).")] = None,
    torch_jobs: Annotated[
        int, typer.Option("--torch-jobs", min=0, help="Number of single-GPU jobs that train a small PyTorch model.")
    ] = 0,
    profiles: Annotated[
        Text,
        typer.Option("--profiles", help="Profiles that set the speed of pretended jobs (default: the built-in ones)."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the two records: measured, simulated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    *,
    trace_options: TraceOptions,
) -> None:
    """Run a trace in real time with jobs that take as long as their profiles say, simulate it with the profiles
    measured from those jobs, and compare.
    """
    from cotenant.cli.progress import jobs_progress, say
    from cotenant.core.errors import InputError
    from cotenant.core.units import parse_memory, parse_seconds
    from cotenant.fleet.replay import ReplayOptions, replay
    from cotenant.profiles.training.tables import load_profiles
    from cotenant.workloads.jobs.select import load_trace

    if not 0 < time_scale <= 100:
        raise InputError(f"must be above 0 and at most 100, not {time_scale:g}", field="time-scale")
    lease_s = parse_seconds(lease, field="lease")
    if not 0.5 <= lease_s <= 86400:
        raise InputError(f"a lease must last 0.5 s to one day, not {lease_s:g} s", field="lease")
    if executor not in ("local", "ray"):
        raise InputError(f"must be local or ray, not {executor!r}", field="executor")
    if out is not None:
        _check_out(out)
    options = ReplayOptions(
        ordering=ordering, allotment=allotment, placement=placement, sticky=sticky, lease_s=lease_s, nodes=nodes,
        gpus_per_node=gpus, cpus_per_node=cpus,
        memory_per_node=None if memory is None else parse_memory(memory, field="memory-per-node"),
        executor=executor, address=address, time_scale=time_scale, torch_jobs=torch_jobs, profile=profiles,
    )  # fmt: skip
    known = load_profiles(profiles)
    jobs = load_trace(trace, trace_options, classes=known.classes, iteration_s=known.iteration_s)
    with jobs_progress("running", len(jobs.jobs)) as tick:
        found = replay(jobs, options, out=out, say=say, progress=tick)
    summary = found.summary() | _described(options, out)
    for doubt in found.doubts():
        print(f"note: {doubt}", file=sys.stderr)
    if as_json:
        print(json.dumps(summary))
        return
    print(f"{summary['jobs']} jobs, {ordering} + {allotment}, {nodes} nodes of {gpus} pretended GPUs ({executor})")
    for name in ("mean_jct", "makespan"):
        measured, simulated = summary[f"measured_{name}_s"], summary[f"simulated_{name}_s"]
        print(f"  {name.replace('_', ' ')}: measured {measured:.1f} s, simulated {simulated:.1f} s, "
              f"{measured / simulated - 1:+.1%}")  # fmt: skip
    print(f"  error per job: median {summary['median_job_error']:.1%}, 90th percentile {summary['p90_job_error']:.1%}")
    if out is not None:
        print(f"  records: {out / 'measured'}, {out / 'simulated'}")


def _check_out(out: Path) -> None:
    from cotenant.core.files import check_folder

    for name in ("measured", "simulated"):
        check_folder(out / name, "run.json")


def _described(options: ReplayOptions, out: Path | None) -> dict[str, object]:
    return {
        "ordering": options.ordering, "allotment": options.allotment, "placement": options.placement,
        "lease_s": options.lease_s, "time_scale": options.time_scale, "executor": options.executor,
        "out": None if out is None else str(out),
    }  # fmt: skip
