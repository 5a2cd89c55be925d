"""`cotenant simulate SERVICES.yaml`: requests on a serving plan, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.shared_options import PlannedScheme
from cotenant.core.files import check_writable, write_text
from cotenant.core.units import counted

if TYPE_CHECKING:
    from rich.table import Table

    from cotenant.core.serving import ServingPlan
    from cotenant.serving.config.planning import Problem
    from cotenant.serving.config.services import Deployment
    from cotenant.sim.serving.engine import ServingResult

app = typer.Typer(add_completion=False)
FILES = "Files"
MARKS = ("--arrivals", "--duration", "--plan")


def wanted(args: list[str]) -> bool:
    """Whether the arguments of `simulate` name a services file rather than a trace."""
    return bool(args) and (not args[0].startswith("-") or any(a.partition("=")[0] in MARKS for a in args))


def refuse_trace(first: str) -> None:
    """Raise InputError with the right option if the first argument of `simulate` is a job trace or a models file."""
    from cotenant.core.errors import InputError
    from cotenant.workloads.jobs.registry import trace_of

    trace = None if first.startswith("-") else trace_of(first)
    if trace is not None:
        raise InputError(f"{first} is a job trace; write --trace {trace}")
    if first.endswith((".yaml", ".yml")) and Path(first).is_file():
        from cotenant.core.yamlfile import read_yaml
        from cotenant.serving.config.models import is_models_file

        if is_models_file(read_yaml(first).content):
            raise InputError(f"{first} is a file of language models; write --serving {first}")


@app.command()
def simulate(
    services: Annotated[str, typer.Argument(help="SERVICES.yaml.")],
    plan: Annotated[
        str | None, typer.Option(help="Plan (JSON) of `cotenant plan` (default: planned and verified here).")
    ] = None,
    arrivals: Annotated[
        str | None,
        typer.Option(
            help="Arrivals: poisson, constant, bursts, gamma:CV, mmpp:R1,D1;R2,D2 (rate factor and seconds of each "
            "state), closed:N (clients), trace:FORMAT:FILE."
        ),
    ] = None,
    duration: Annotated[str, typer.Option(help="Duration in virtual time.")] = "60s",
    seed: Annotated[int, typer.Option(help="Seed of the requests.")] = 0,
    what_if: Annotated[
        list[str] | None, typer.Option(help="Change to the requests but not to the plan: rate=x1.5. Repeatable.")
    ] = None,
    planner: Annotated[str | None, typer.Option(help="Planner, if no plan is given.")] = None,
    verify: Annotated[bool, typer.Option(help="Verify the plan that is made here.")] = True,
    gpus: Annotated[int | None, typer.Option(help="Number of GPUs, instead of the file's.")] = None,
    colocation: PlannedScheme = None,
    interference: Annotated[
        str,
        typer.Option(
            help="Interference: planned (neighbours always run their planned batches) or running (what actually runs)."
        ),
    ] = "planned",
    hold: Annotated[
        float, typer.Option(help="Fraction of a duty cycle that a batch smaller than planned waits for more requests.")
    ] = 0.0,
    as_recorded: Annotated[bool, typer.Option("--as-recorded", help="Keep the trace's own rate.")] = False,
    profile: Annotated[
        str | None, typer.Option(help="Profile: a JSON file or a folder.", rich_help_panel=FILES)
    ] = None,
    requests_csv: Annotated[
        str | None,
        typer.Option(help="Write one CSV row per request, in the format of the server's log.", rich_help_panel=FILES),
    ] = None,
    client_csv: Annotated[
        str | None,
        typer.Option(help="Write one CSV row per request, in the format of the client's log.", rich_help_panel=FILES),
    ] = None,
    html: Annotated[str | None, typer.Option(help="Write a self-contained report page.", rich_help_panel=FILES)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Simulate requests on a serving plan with batching and drops; report percentiles and SLO attainment per
    service.
    """
    from cotenant.core.errors import InputError, WorkError
    from cotenant.core.units import parse_seconds
    from cotenant.serving.config.planning import build_problem
    from cotenant.serving.config.services import read_services, with_scheme

    if not 0.0 <= hold <= 1.0:
        raise InputError(f"{hold:g} is not between 0 and 1", field="hold")
    duration_s = parse_seconds(duration, field="duration")
    check_writable(requests_csv, client_csv, html)
    deployment = with_scheme(read_services(services), colocation)
    problem = build_problem(deployment, profile, gpus)
    found = _plan(plan, problem, planner, verify, seed)
    result = run_scenario(
        deployment, problem, found, arrivals=arrivals, duration_s=duration_s, seed=seed, changes=what_if or [],
        profile=profile, interference=interference, hold=hold, as_recorded=as_recorded,
    )  # fmt: skip
    _write_tables(result, requests_csv, client_csv)
    if html is not None:
        from cotenant.report.serving import write_page

        write_page(html, result)
    content = {**result.summary(), "planner": found.planner, "gpus_used": found.gpus_used}
    if as_json:
        import json

        print(json.dumps(content))
    else:
        _show(content)
    if plan is None and found.unserved is not None:
        raise WorkError(found.unserved)


def _plan(path: str | None, problem: Problem, planner: str | None, verify: bool, seed: int) -> ServingPlan:
    from cotenant.cli.plan import read_plan

    if path is not None:
        if path.endswith(".txt"):
            from cotenant.serving.config.gpulet_files import read_modellist

            return read_modellist(path, problem)
        return read_plan(path)
    from cotenant.cli.progress import say_compiling_serving
    from cotenant.serving.planning.decide import decide

    return decide(
        problem, problem.planner(planner), problem.headroom, target=0.99 if verify else None, seed=seed + 1_000_003,
        on_ready=say_compiling_serving,
    ).plan  # fmt: skip


def run_scenario(
    deployment: Deployment, problem: Problem, plan: ServingPlan, *, arrivals: str | None, duration_s: float, seed: int,
    changes: list[str], profile: str | None, interference: str, hold: float, as_recorded: bool,
) -> ServingResult:  # fmt: skip
    """Simulate the load of a services file on a plan. `arrivals`: arrival process of services that state none."""
    from cotenant.serving.config.planning import build_problem, what_if
    from cotenant.sim.serving.engine import Scenario, run
    from cotenant.workloads.requests.arrivals import parse_arrivals

    sent = build_problem(what_if(deployment, changes), profile, len(problem.gpus)) if changes else problem
    processes = {"": parse_arrivals(arrivals or "poisson")}
    if arrivals is None:
        processes |= {name: parse_arrivals(text) for name, text in deployment.arrivals.items()}
    scenario = Scenario(
        sent.own_services, duration_s, processes, sent.applications, seed, interference, hold, as_recorded
    )
    return run(plan, scenario, problem.profiles)


def _write_tables(result: ServingResult, requests_csv: str | None, client_csv: str | None) -> None:
    for path, table in ((requests_csv, result.table), (client_csv, result.client_table)):
        if path is not None:
            write_text(path, table().write_csv())


HEADS = ("sent", "p50 ms", "p95 ms", "p99 ms", "late", "dropped", "in time")
DISPENSABLE = ("p50 ms", "sent", "p95 ms", "dropped", "late", "p99 ms")


def _show(content: dict[str, Any]) -> None:
    from rich.markup import escape

    from cotenant.cli.fitting import figures_table, print_fitting

    rows = {**content["services"], **content["applications"]}

    def build(heads: Sequence[str], broken: bool = False) -> Table:
        title = f"{content['requests']:,} requests, seed {content['seed']}, {counted(content['gpus_used'], 'GPU')}"
        table = figures_table(title, "service", heads)
        for name, row in rows.items():
            cells = _cells(row)
            # a stage is named `application:model`; its name is printed on two lines to leave space for the figures
            table.add_row(escape(name.replace(":", ":\n  ", 1) if broken else name), *(cells[head] for head in heads))
        return table

    print_fitting(build, lambda heads: build(heads, broken=True), HEADS, DISPENSABLE)


def _cells(row: dict[str, Any]) -> dict[str, str]:
    times = {f"{p} ms": "-" if row[f"{p}_ms"] is None else f"{row[f'{p}_ms']:.1f}" for p in ("p50", "p95", "p99")}
    counts = {name: f"{row[name]:,}" for name in ("sent", "late", "dropped")}
    return {**times, **counts, "in time": "-" if row["slo_attainment"] is None else f"{row['slo_attainment']:.2%}"}
