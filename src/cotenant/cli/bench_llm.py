"""`cotenant bench llm`: compares simulated TTFT and TPOT with those of a timed engine, a server whose steps take the
times of a profile and which runs no model."""

from __future__ import annotations

from typing import Annotated

import typer


def llm(
    profile: Annotated[str, typer.Option(help="Profile written by `profile llm`, or a model size such as 8b.")] = "8b",
    rates: Annotated[str, typer.Option(help="Request rates in 1/s; each is a load of its own.")] = "1,4,8",
    prompt: Annotated[str, typer.Option(help="Prompt lengths in tokens: 512, 100-900, 512~1.2 (mean~CV).")] = "1000~1",
    output: Annotated[str, typer.Option(help="Answer lengths in tokens, in the same notation.")] = "128~0.7",
    trace: Annotated[
        str | None, typer.Option(help="FORMAT:PATH: replay this trace as one more load, for --duration.")
    ] = None,
    duration: Annotated[str, typer.Option(help="Duration of each load.")] = "60s",
    rounds: Annotated[int, typer.Option(min=2, help="Repetitions of each point when the engine is profiled.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the requests.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare simulated TTFT and TPOT with measured ones. The measured server is a timed engine: its steps take the
    times of --profile, and it runs no model. It is profiled through its API and gets requests in real time; the same
    requests are simulated with the measured profile.
    """
    import sys

    from cotenant.bench.llm_fidelity import compare, dump, table
    from cotenant.core.errors import InputError
    from cotenant.core.units import parse_seconds
    from cotenant.profiles.llm.files import find_profile
    from cotenant.workloads.llm.drawn import draw_trace
    from cotenant.workloads.llm.registry import read_tokens
    from cotenant.workloads.llm.trace import TokenOptions

    length_s = parse_seconds(duration, field="duration")
    found = find_profile(profile, "timed")
    loads = []
    for text in rates.split(","):
        try:
            rate = float(text)
        except ValueError:
            raise InputError(f"{text!r} is not a rate in requests per second", field="rates") from None
        loads.append((f"{rate:g}/s", draw_trace([found.name], [rate], prompt, output, length_s, seed=seed)))
    if trace is not None:
        read = read_tokens(trace, TokenOptions(0.0, length_s, seed)).onto([found.name], seed)
        loads.append((trace.partition(":")[0], read))
    result = compare(found, loads, rounds, seed, lambda line: print(line, file=sys.stderr, flush=True))
    print(dump(result) if as_json else table(result))
