"""`cotenant plan`: divide GPUs into gpulets (parts of GPUs) for services with SLOs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from cotenant.cli.shared_options import PlannedScheme
from cotenant.core.errors import InputError, WorkError
from cotenant.core.files import check_writable, write_text

if TYPE_CHECKING:
    from cotenant.core.serving import ServingPlan
    from cotenant.serving.config.planning import Problem

app = typer.Typer(add_completion=False)

FILES, OUTPUT, SETS = "Input", "Output", "Scenario sets"


@app.command()
def plan(
    services: Annotated[
        str | None, typer.Argument(help="Services file, or `scenarios` (generate a set), or `fit-interference`.")
    ] = None,
    planner: Annotated[
        str | None,
        typer.Option(help="Planner: temporal, greedy, usher, gpulet, gpulet-interference (default) or exact."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="Number of GPUs, instead of the file's.")] = None,
    min_gpus: Annotated[
        bool, typer.Option("--min-gpus", help="Find the smallest number of GPUs that suffices.")
    ] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(help="Change to the file: rate=x1.5, slo=x0.8, rate.NAME=120, headroom=1.5. Repeatable."),
    ] = None,
    headroom: Annotated[
        float | None, typer.Option(help="Plan for the rates times this factor, instead of the file's headroom.")
    ] = None,
    verify: Annotated[
        bool, typer.Option(help="Simulate the plan, and plan for more load where requests would be late.")
    ] = True,
    attainment: Annotated[str, typer.Option(help="SLO attainment that a verified plan must reach.")] = "99%",
    seed: Annotated[int, typer.Option(help="Seed of the simulated requests.")] = 0,
    time_limit: Annotated[str, typer.Option(help="The solver's time for one decision.")] = "30s",
    pairs: Annotated[
        str | None, typer.Option(help="For fit-interference: CSV of measured pairs of services on one GPU.")
    ] = None,
    autoscale: Annotated[
        str | None,
        typer.Option(help="CSV of measured rates (time_s and a column per service): plan the GPUs over time."),
    ] = None,
    forecast: Annotated[str, typer.Option(help="For --autoscale: ewma or trend.")] = "trend",
    patience: Annotated[
        int, typer.Option(help="For --autoscale: decisions in a row that must agree before GPUs are released.")
    ] = 3,
    period: Annotated[str, typer.Option(help="For --autoscale: time between decisions.")] = "20s",
    profile: Annotated[
        str | None, typer.Option(help="Profile: a JSON file or a folder.", rich_help_panel=FILES)
    ] = None,
    colocation: PlannedScheme = None,
    previous: Annotated[
        str | None,
        typer.Option("--from", help="Earlier plan (JSON): change as little of it as possible.", rich_help_panel=FILES),
    ] = None,
    scenarios: Annotated[
        str | None, typer.Option(help="CSV of scenarios, each planned separately.", rich_help_panel=SETS)
    ] = None,
    like: Annotated[
        str, typer.Option(help="Set to generate: gpulet-1023, gpulet-19682 or ladder.", rich_help_panel=SETS)
    ] = "gpulet-1023",
    report: Annotated[
        str | None,
        typer.Option(
            help="Write a CSV with each scenario's outcome, bound (no plan serves more than this factor of the rates) "
            "and decision time.",
            rich_help_panel=SETS,
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(help="Repetitions of each decision; the shortest time is reported.", rich_help_panel=SETS)
    ] = 1,
    out: Annotated[
        str | None, typer.Option(help="Write the plan (JSON), plans or scenarios (CSV) here.", rich_help_panel=OUTPUT)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Divide the GPUs into gpulets: which models run on each, with which batch and duty cycle, and each service's
    headroom. `plan scenarios --like SET --out F` generates sets of scenarios; `plan fit-interference --pairs F` fits
    the interference model of a profile.

    With MODELS.yaml as first argument: language models, see `cotenant plan MODELS.yaml --help`.
    """
    from cotenant.core.units import parse_fraction, parse_seconds
    from cotenant.policy.serving.packing.specs import DEFAULT_PLANNER, find_planner

    limit_s = parse_seconds(time_limit, field="time-limit")
    if scenarios is not None and colocation is not None:
        raise InputError("--colocation needs a services file", field="colocation")
    if services is not None and scenarios is not None:
        raise InputError("give SERVICES.yaml or --scenarios, not both")
    check_writable(out)
    if services == "scenarios":
        from cotenant.cli.plan_sets import generate_set

        generate_set(like, out, as_json)
        return
    if services == "fit-interference":
        from cotenant.cli.plan_fit import fit

        fit(pairs, profile, out, as_json)
        return
    if scenarios is not None:
        from cotenant.cli.plan_sets import plan_set

        spec = find_planner(planner or DEFAULT_PLANNER)
        plan_set(scenarios, profile, 4 if gpus is None else gpus, spec, limit_s, out, report, as_json, repeats)
        return
    problem = _problem(services, profile, gpus, what_if or [], colocation)
    if autoscale is not None:
        from cotenant.cli.plan_autoscale import replay

        replay(problem, problem.planner(planner), autoscale, forecast, patience, period, as_json)
        return
    if headroom is not None and not 1 <= headroom <= 100:
        raise InputError(f"headroom must be between 1 and 100, not {headroom:g}", field="headroom")
    spec = problem.planner(planner)
    factor = headroom or problem.headroom
    if seed < 0:
        raise InputError(f"a seed must be at least 0, not {seed}", field="seed")
    old = None if previous is None else read_plan(previous)
    target = parse_fraction(attainment, field="attainment") if verify else None
    from cotenant.cli import plan_view
    from cotenant.cli.progress import say_compiling_serving
    from cotenant.serving.planning.decide import decide

    with _told_of(services, profile, gpus, *(what_if or []), planner, headroom, old, min_gpus or None):
        found = decide(
            problem, spec, factor, target=target, min_gpus=min_gpus, start=old, seed=seed, time_limit_s=limit_s,
            on_ready=say_compiling_serving,
        )  # fmt: skip
    content = plan_view.content(found, problem, old)
    if out is not None:
        write_text(out, json.dumps(content, indent=1) + "\n")
    if as_json:
        print(json.dumps(content))
    else:
        plan_view.show(content)
    if found.unmet is not None:
        raise WorkError(found.unmet)


@contextlib.contextmanager
def _told_of(services: str | None, *options: object) -> Iterator[None]:
    """Add the file's name to an InputError, if no option was given that could be wrong instead (all are None)."""
    try:
        yield
    except InputError as error:
        if error.file is not None or any(option is not None for option in options):
            raise
        raise InputError(error.message, file=services, field=error.field) from None


def _problem(
    services: str | None, profile: str | None, gpus: int | None, changes: list[str], colocation: str | None
) -> Problem:
    from cotenant.core.gpus import CATALOG
    from cotenant.serving.config.planning import build_problem, what_if
    from cotenant.serving.config.services import read_services, with_scheme

    if services is None:
        raise InputError("give SERVICES.yaml, or --scenarios")
    deployment = with_scheme(read_services(services), colocation)
    with _told_of(services, profile, gpus, *changes):
        problem = build_problem(what_if(deployment, changes), profile, gpus)
    models = ", ".join(model for model in dict.fromkeys(deployment.gpu_models) if model in CATALOG)
    if deployment.mechanism == "cores" and models:
        what = f"mechanism cores gives workers CPU cores, but this plan uses speeds measured on parts of {models}"
        typer.echo(f"note: {what}", err=True)
    return problem


def read_plan(path: str) -> ServingPlan:
    """Read a serving plan that `cotenant plan` wrote."""
    from cotenant.core.jsonfile import read_json
    from cotenant.core.serving import ServingPlan

    return ServingPlan.from_dict(read_json(path), path)
