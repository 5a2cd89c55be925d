"""`cotenant demo`: six policies on one seeded trace, then two processes on the software GPU."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)

# (ordering, allotment). fifo and srtf come with both allotments, proportional and tune, to show the effect of the
# allotment; las and ftf come with tune only.
POLICIES = (
    ("fifo", "proportional"),
    ("fifo", "tune"),
    ("srtf", "proportional"),
    ("srtf", "tune"),
    ("las", "tune"),
    ("ftf", "tune"),
)
# the load exceeds what the cluster can do, so that the policies differ in how they queue jobs
JOBS, GPUS, LOAD = 1000, 128, 1.5
SHARES, SECONDS = (0.3, 0.7), 2.5  # requests of the tenants that share the software GPU, and for how long they run


def _own_name() -> str:
    """Return how to call this command in a line that can be copied: `cotenant`, or its path if it is not on PATH."""
    called = sys.argv[0]
    return "cotenant" if shutil.which("cotenant") == str(Path(called).resolve()) else called


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for the runs and the report.")] = Path("demo-out"),
    seed: Annotated[int, typer.Option("--seed", help="Seed of the trace.")] = 1,
) -> None:
    """Simulate a seeded 1,000-job trace on 128 GPUs under six policies, print a table, write an HTML report.

    Then two programs share one software GPU, as real processes.
    """
    from cotenant.cli.progress import say_compiling
    from cotenant.cli.simulate import check_outputs
    from cotenant.profiles.training.tables import load_profiles
    from cotenant.report.page import write_page
    from cotenant.report.runs import arrange, run_of
    from cotenant.report.table import print_runs
    from cotenant.sim.jobs.options import TrainingConfig
    from cotenant.sim.jobs.training import simulate
    from cotenant.workloads.clusters.forms import parse_cluster
    from cotenant.workloads.jobs.generate import Workload, generate

    check_outputs(out, holds="report.html")
    profiles = load_profiles()
    cluster = parse_cluster("16x8")
    workload = Workload(jobs=JOBS, load=LOAD, cluster_gpus=cluster.total_gpus, seed=seed)
    drawn = generate(workload, profiles.classes, profiles.iteration_s)
    out.mkdir(parents=True, exist_ok=True)
    typer.echo(f"{JOBS:,} jobs (seed {seed}) with an offered load of {LOAD:.0%} on {cluster.describe()}")
    say_compiling()
    started = time.perf_counter()
    records = []
    for ordering, allotment in POLICIES:
        config = TrainingConfig(ordering=ordering, allotment=allotment)
        record, outcome = simulate(drawn.trace, cluster, config, profiles=profiles, out=out / f"{ordering}-{allotment}")
        typer.echo(f"  {record.info.label:20} {record.rounds.height:,} rounds in {outcome.engine_s:.2f} s")
        records.append(record)
    families = {model.name: model.family for model in profiles.models.values()}
    runs = arrange([run_of(record, families) for record in records])
    print_runs([(run.label, run.summary) for run in runs])
    page = out / "report.html"
    write_page(page, runs, f"{JOBS:,} jobs on {GPUS} GPUs under six policies")
    typer.echo(f"wrote {page} ({time.perf_counter() - started:.1f} s in all); open it in a browser")
    typer.echo(f"one job's life: {_own_name()} explain {out}/las-tune 17")
    typer.echo("moving a job costs no time here; --restart-cost 60s adds a cost, and running jobs then keep their GPUs")
    _show_sharing(_own_name())


def _show_sharing(program: str) -> None:
    """Run two tenants that request 30 % and 70 % of the time on one GPU, under an agent that the demo starts.
    `program`: how the user calls cotenant.
    """
    from cotenant.bench.shares import measure
    from cotenant.core.errors import InputError, WorkError

    typer.echo("\ntwo programs share one GPU (the software GPU, on which kernels take time but compute nothing):")
    try:
        result = measure(SHARES, (1.0, 1.0), SECONDS, kernel_ms=4.0, work_in_flight_ms=16.0, solo_block_s=0.3)
    except (InputError, WorkError) as error:
        typer.echo(f"  left out: {error}")
        return
    for asked, got, turns in zip(SHARES, result["got"], result["turns"], strict=True):
        typer.echo(f"  requested {asked:.0%}, got {got:.1%} of the GPU's time in {turns} turns")
    typer.echo(f"  together {result['total_over_solo']:.1%} of the throughput of one program alone")
    typer.echo(f"try it: {program} agent --gpus soft, and in another terminal {program} run --request 30% -- CMD")
