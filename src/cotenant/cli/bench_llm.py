"""`cotenant bench llm`."""

from __future__ import annotations

from typing import Annotated

import typer


def llm(
    profile: Annotated[str, typer.Option(help="File of `profile llm`, or a size: 8b.")] = "8b",
    rates: Annotated[str, typer.Option(help="Requests/s, one load each.")] = "1,4,8",
    prompt: Annotated[str, typer.Option(help="Tokens of prompts: 512, 100-900, 512~1.2.")] = "1000~1",
    output: Annotated[str, typer.Option(help="Tokens of answers.")] = "128~0.7",
    trace: Annotated[str | None, typer.Option(help="FORMAT:PATH, one more load, of its --duration.")] = None,
    duration: Annotated[str, typer.Option(help="Length of each load.")] = "60s",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of the engine's measurement.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the requests.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Are simulated TTFT and TPOT those of an engine? A timed engine is measured through its API; the same requests are
    then sent to it in real time and replayed in virtual time with what was measured."""
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
