"""`cotenant plan MODELS.yaml`: how many of the models fit on one GPU at a given attainment, and how many GPUs all
need.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.llm_setup import (
    GpuMemory,
    Profiles,
    Requests,
    build_setup,
    build_trace,
    fitting,
    gpu_memory,
    profiles_of,
    rates_of,
    takes_requests,
    times_content,
    times_sentence,
)
from cotenant.core.errors import InputError, WorkError

if TYPE_CHECKING:
    from cotenant.sim.llm.engine import LlmSetup
    from cotenant.sim.llm.packing import Row
    from cotenant.workloads.llm.trace import TokenTrace

app = typer.Typer(add_completion=False)


def wanted(args: Sequence[str]) -> bool:
    """Whether the arguments of `plan` name a file of language models."""
    # options that only plans of language models have; so the error about a file that is not there is about the file
    if any(arg.partition("=")[0] in ("--divide", "--rate", "--prompt") for arg in args):
        return True
    # among the values of options only YAML counts, because a JSON file of a profile may have models, too; a file
    # models.yaml that is not there counts, so that `cotenant plan models.yaml --help` is as documented
    if any(_has_models(arg) for arg in args if arg.lower().endswith((".yaml", ".yml"))):
        return True
    return bool(args) and (_has_models(args[0]) or (args[0].lower() == "models.yaml" and not Path(args[0]).exists()))


def _has_models(path: str) -> bool:
    """Whether an argument is a file of language models."""
    if path.startswith("-") or not Path(path).is_file():
        return False
    from cotenant.core.yamlfile import read_yaml
    from cotenant.serving.config.models import is_models_file

    try:
        content = read_yaml(path).content
    except InputError:  # the command that reads the file later reports the error
        return False
    return is_models_file(content)


@app.command()
@takes_requests
def plan(
    requests: Requests,
    models: Annotated[str, typer.Argument(help="Models file, the same as for `cotenant serve`.")],
    profile: Profiles = None,
    attainment: Annotated[
        str, typer.Option(help="Fraction of requests in time that every latency-sensitive model must reach.")
    ] = "99%",
    sharing: Annotated[
        str, typer.Option(help="Sharing of a GPU by its models: conserving or fixed, as for `simulate --serving`.")
    ] = "conserving",
    most_gpus: Annotated[int, typer.Option(min=1, help="Largest number of GPUs to try for all models together.")] = 16,
    divide: Annotated[
        str | None,
        typer.Option(metavar="GPU", help="Divide GPUs of this GPU model, H100-80GB: by MIG instances, SMs or turns."),
    ] = None,
    start_up: Annotated[
        str | None, typer.Option("--start-up", help="Time that a model's program takes to start (default: 30s).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Simulate one GPU with the first model, the first two, and so on, then all models on more GPUs. Reports how many
    requests meet ttft_ms and tpot_ms, and how often models switch to or from a GPU. With --rate, each model gets that
    many requests per second. With --divide, each model gets parts of GPUs on which it always stays, and the plan has as
    few GPUs as possible.
    """
    import json

    from cotenant.core.units import counted, parse_fraction, parse_seconds
    from cotenant.serving.config.models import read_models
    from cotenant.sim.llm.packing import pack

    config = read_models(models, starts=False)
    target = parse_fraction(attainment, field="attainment")
    start_s = None if start_up is None else parse_seconds(start_up, field="start-up")
    memory = gpu_memory(config, divide)
    profiles = profiles_of(config, profile or [], memory.model)
    setup = build_setup(config, profiles, memory, 1, sharing, [], start_s=start_s)
    names = [m.name for m in config.models]
    trace = fitting(_trace(names, requests), setup.models, each=True)
    if divide is not None:
        from cotenant.cli.plan_divided import plan_parts

        plan_parts(config, setup, memory, profile or [], divide, trace, target, most_gpus, requests.seed, as_json)
        return
    found = pack(trace, setup, target, most_gpus, None if as_json else _say)
    needed = _requests(setup, trace)
    if as_json:
        assumed = memory.content() | times_content(setup)
        print(json.dumps(found.content() | {"requests": needed} | assumed | {"seed": requests.seed}))
    else:
        _show(found.content(), setup, memory, needed)
        for reason, count in trace.left_out.items():
            print(f"note: {counted(count, 'request')} left out: {reason}", file=sys.stderr)
    if found.gpus is None:
        raise WorkError(_unmet(found.rows[-1], len(setup.models)))


def _trace(names: list[str], given: Requests) -> TokenTrace:
    """Build the requests to the models. A rate without a model's name applies to each model, so that every added model
    adds requests.
    """
    if given.rate and given.trace is None:
        rates_of(names, given.rate)
        named = [text for text in given.rate if "=" in text]
        others = [n for n in names if n not in {text.rpartition("=")[0] for text in named}]
        each = named + [f"{name}={text}" for text in given.rate if "=" not in text for name in others]
        given = dataclasses.replace(given, rate=each)
    return build_trace(names, given)


def _say(row: Row) -> None:
    from cotenant.core.units import counted

    print(
        f"{counted(row.models, 'model')} on {counted(row.gpus, 'GPU')}: "
        f"at least {row.least:.2%} in time for each latency-sensitive model",
        file=sys.stderr,
    )


def _requests(setup: LlmSetup, trace: TokenTrace) -> dict[str, float]:
    """Estimate for each latency-sensitive model the `request` with which it keeps its TPOT beside busy models."""
    from cotenant.profiles.llm.partitions import request_for
    from cotenant.sim.llm.divided import traffic_of

    span_s = max(trace.span_s, 1e-9)
    return {
        model.facts.name: request_for(model.profile.times, traffic_of(trace, i, span_s), model.target.tpot_ms / 1e3)
        for i, model in enumerate(setup.models)
        if (trace.model == i).any() and not model.facts.best_effort and model.target.tpot_ms
    }


def _show(content: dict[str, Any], setup: LlmSetup, memory: GpuMemory, requests: dict[str, float]) -> None:
    from rich.markup import escape

    from cotenant.cli.fitting import plain_table, print_whole
    from cotenant.core.units import counted

    best_effort = [m.facts.name for m in setup.models if m.facts.best_effort]
    beside = ("best-effort",) if best_effort else ()
    heads = ("models", "GPUs", "least in time", "of", *beside, "all", "TTFT p99", "TPOT p99", "busy", "switches")
    table = plain_table(None, heads, left=("of",))
    for row in content["rows"]:
        ttft, tpot = (row[k] for k in ("ttft_p99_ms", "tpot_p99_ms"))
        table.add_row(
            str(row["models"]), str(row["gpus"]), f"{row['least']:.2%}" if row["least_of"] else "-",
            escape(row["least_of"]) or "-", *(_part(row["best_effort"]) for _ in beside), _part(row["attainment"]),
            f"{ttft:.0f}", "-" if tpot is None else f"{tpot:.1f}", f"{row['busy']:.0%}", f"{row['switches']:,}",
        )  # fmt: skip
    print_whole(table)
    target, whole = f"{100 * content['target']:g}%", len(setup.models)
    of_each = "each latency-sensitive model" if best_effort else "each model"
    print(f"one GPU serves {content['per_gpu']} of the {whole} models: {of_each} has {target} of its requests in time")
    if (gpus := content["gpus"]) is not None:
        apart = f" (one for each model would be {whole})" if gpus < whole else ""
        print(f"all {whole} models need {counted(gpus, 'GPU')}{apart}")
    if best_effort:
        print(
            f"best-effort models need not reach {target}: they count only if none of their requests is answered "
            f"(here: {', '.join(best_effort)})"
        )
    needed = ", ".join(f"{name} {part:.0%}" for name, part in requests.items())
    if needed and whole > 1:
        print(f"request with which models keep tpot_ms beside busy ones, estimated: {needed}")
    print(memory.sentence())
    print(times_sentence(setup, memory))


def _part(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _unmet(last: Row, models: int) -> str:
    if last.gpus < models:
        return f"all models need more than the {last.gpus} GPUs that were tried"
    return f"{last.least_of} has {last.least:.2%} in time with a GPU for each model: more GPUs do not help"
