"""`cotenant bench budget`: how much best-effort work a latency-sensitive service tolerates beside it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer


def budget(
    ls: Annotated[
        str, typer.Option(metavar="MODEL:BATCH:RATE", help="The latency-sensitive service.")
    ] = "resnet50:4:300",
    be: Annotated[str, typer.Option(metavar="addN|copyN", help="What moves memory beside it, over N MiB.")] = "add64",
    sms: Annotated[str, typer.Option(metavar="LIST", help="Parts of the SMs that it may use.")] = "10%,25%,100%",
    overlap: Annotated[
        str, typer.Option(metavar="LIST", help="Parts of the time that it works.")
    ] = "5%,10%,20%,40%,100%",
    tolerated: Annotated[str, typer.Option(metavar="PART", help="How much longer a request may take.")] = "5%",
    block: Annotated[str, typer.Option(metavar="TIME", help="Length of a block.")] = "1s",
    gpus: Annotated[str, typer.Option(metavar="soft|UUID", help="The software GPU or a real one.")] = "soft",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """The curve of a service's slowdown over the memory bandwidth of best-effort work, and the budget that it allows.

    Best-effort work runs beside the service all the time, for a part of it, on a part of the SMs.
    """
    import sys

    from cotenant.bench.colocation import parse_ls
    from cotenant.bench.colocation_budget import Budget, bytes_moved, measure
    from cotenant.core.errors import InputError
    from cotenant.core.units import parse_fraction, parse_seconds

    block_s = parse_seconds(block, "--block")
    if not 0.1 <= block_s <= 600:
        raise InputError("a block lasts 0.1 s to 10 min", field="--block")
    bytes_moved(be)
    from cotenant.devices.registry import discover

    discover([gpus])  # so that a wrong one is said before anything starts
    wanted = Budget(
        parse_ls(ls),
        be,
        _parts(sms, "--sms"),
        _parts(overlap, "--overlap"),
        1 + parse_fraction(tolerated, "--tolerated"),
        block_s,
    )
    found = measure(gpus, wanted, progress=lambda text: print(text, file=sys.stderr, flush=True))
    print(json.dumps(found) if as_json else _in_words(found))


def _parts(text: str, field: str) -> list[float]:
    from cotenant.core.errors import InputError
    from cotenant.core.units import parse_fraction

    parts = sorted({parse_fraction(part.strip(), field) for part in text.split(",")})
    if not 0.01 <= parts[0] <= parts[-1] <= 1.0:
        raise InputError("parts are 1 % to 100 %", field=field)
    return parts


def _in_words(found: dict[str, Any]) -> str:
    chosen, more = found["budget"], found["tolerated"] - 1
    said = f"{found['gpu']}: within {more:.0%} of the service's time alone, {found['be']} may work beside it"
    if not chosen["overlap"]:
        return f"{said} not at all: leave `overlap` at 0%"
    return (
        f"{said} for {chosen['overlap']:.0%} of the time on {chosen['be_sms']:.0%} of the SMs, {chosen['gb_per_s']:.0f}"
        f" GB/s.\n`colocation: {{overlap: {100 * chosen['overlap']:.0f}%}}` in the agent's file, and `cotenant run"
        f" --best-effort --mechanism mps --limit {chosen['be_sms']:.0%}`"
    )
