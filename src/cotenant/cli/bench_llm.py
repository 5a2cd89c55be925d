"""`cotenant bench llm`: compares simulated TTFT and TPOT with those of an engine: a given one, or a timed engine, a
server whose steps take the times of a profile and which runs no model."""

from __future__ import annotations

from typing import Annotated

import typer

from cotenant.cli.progress import say
from cotenant.core.errors import check_choice


def llm(
    profile: Annotated[str, typer.Option(help="Profile written by `profile llm`, or a model size such as 8b.")] = "8b",
    rates: Annotated[str, typer.Option(help="Request rates in 1/s; each is a load of its own.")] = "1,4,8",
    prompt: Annotated[str, typer.Option(help="Prompt lengths in tokens: 512, 100-900, 512~1.2 (mean~CV).")] = "1000~1",
    output: Annotated[str, typer.Option(help="Answer lengths in tokens, in the same notation.")] = "128~0.7",
    trace: Annotated[
        str | None, typer.Option(help="FORMAT:PATH: replay this trace as one more load, for --duration.")
    ] = None,
    duration: Annotated[str, typer.Option(help="Duration of each load.")] = "60s",
    url: Annotated[
        str | None, typer.Option(help="http://HOST:PORT of a running engine to measure, not a timed one. With --model.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Name of the model at the engine of --url.")] = None,
    endpoint: Annotated[str, typer.Option(help="API to use: completions or chat.")] = "completions",
    rounds: Annotated[int, typer.Option(min=2, help="Repetitions of each point of a timed engine's profile.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the requests.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare simulated TTFT and TPOT with measured ones. Without --url, the measured server is a timed engine: its
    steps take the times of --profile, and it runs no model. It is profiled through its API and gets requests in real
    time; the same requests are simulated with the measured profile. With --url, the server is that engine, and
    --profile the file that `cotenant profile llm` wrote for it.
    """
    import contextlib

    from cotenant.core.errors import InputError
    from cotenant.core.extras import require
    from cotenant.core.units import parse_seconds

    require("serve", "numpy", "httptools", "orjson")
    from cotenant.bench.llm_fidelity import Engine, compare, dump, fitting_loads, given_engine, own_engine, table
    from cotenant.loadgen.openai import PATHS
    from cotenant.profiles.llm.files import find_profile
    from cotenant.workloads.llm.drawn import draw_trace
    from cotenant.workloads.llm.registry import read_tokens
    from cotenant.workloads.llm.trace import TokenOptions

    length_s = parse_seconds(duration, field="duration")
    check_choice(endpoint, PATHS, "endpoint")
    if (url is None) != (model is None):
        raise InputError("give both --url and --model, or neither", field="model" if model is None else "url")

    running: contextlib.AbstractContextManager[Engine]
    if url is not None and model is not None:
        given = given_engine(url, model, profile, endpoint)
        name, found, running = model, given.profile, contextlib.nullcontext(given)
    else:
        found = find_profile(profile, "timed")
        name, running = found.name, own_engine(found, rounds, endpoint, seed, say)
    loads = []
    for text in rates.split(","):
        try:
            rate = float(text)
        except ValueError:
            raise InputError(f"{text!r} is not a rate in requests per second", field="rates") from None
        loads.append((f"{rate:g}/s", draw_trace([name], [rate], prompt, output, length_s, seed=seed)))
    if trace is not None:
        read = read_tokens(trace, TokenOptions(0.0, length_s, seed)).onto([name], seed)
        loads.append((trace.partition(":")[0], read))
    fitting_loads(found, loads)  # what cannot be measured is refused before the engine's profile is
    with running as engine:
        result = compare(engine, loads, seed, say)
    print(dump(result) if as_json else table(result))
