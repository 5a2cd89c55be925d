"""`cotenant bench budget`: how much best-effort work a latency-sensitive service tolerates on the same GPU."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from cotenant.cli.progress import say
from cotenant.core.errors import InputError
from cotenant.core.units import parse_fraction, parse_seconds


def budget(
    ls: Annotated[
        str, typer.Option(metavar="MODEL:BATCH:RATE", help="The latency-sensitive service.")
    ] = "resnet50:4:300",
    be: Annotated[
        str, typer.Option(metavar="addN|copyN", help="Best-effort load that moves N MiB of memory.")
    ] = "add64",
    sms: Annotated[
        str, typer.Option(metavar="LIST", help="Fractions of the SMs to try for best-effort work.")
    ] = "10%,25%,100%",
    overlap: Annotated[
        str, typer.Option(metavar="LIST", help="Duty cycles to try for best-effort work.")
    ] = "5%,10%,20%,40%,100%",
    tolerated: Annotated[str, typer.Option(metavar="PART", help="Accepted slowdown of the service's requests.")] = "5%",
    block: Annotated[str, typer.Option(metavar="TIME", help="Duration of a block.")] = "1s",
    gpus: Annotated[
        str, typer.Option(metavar="soft|UUID", help="soft (the software GPU), or the UUID or index of a real GPU.")
    ] = "soft",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure by how much memory-bound best-effort work slows down a latency-sensitive service on the same GPU.
    Recommend for which fraction of the time such work may run beside the service (`overlap` in the agent's file).

    The slowdown is measured for each fraction of the SMs in --sms and each duty cycle in --overlap.
    """

    from cotenant.bench.colocation import parse_ls
    from cotenant.bench.colocation_budget import Budget, bytes_moved, measure

    block_s = parse_seconds(block, "--block")
    if not 0.1 <= block_s <= 600:
        raise InputError("the duration of a block must be between 0.1 s and 10 min", field="--block")
    bytes_moved(be)
    from cotenant.devices.registry import discover

    discover([gpus])  # a wrong GPU is reported before anything starts
    wanted = Budget(
        parse_ls(ls),
        be,
        _parts(sms, "--sms"),
        _parts(overlap, "--overlap"),
        1 + parse_fraction(tolerated, "--tolerated"),
        block_s,
    )
    found = measure(gpus, wanted, progress=say)
    print(json.dumps(found) if as_json else _in_words(found))


def _parts(text: str, field: str) -> list[float]:
    parts = sorted({parse_fraction(part.strip(), field) for part in text.split(",")})
    if not 0.01 <= parts[0] <= parts[-1] <= 1.0:
        raise InputError("fractions must be between 1 % and 100 %", field=field)
    return parts


def _in_words(found: dict[str, Any]) -> str:
    chosen, more = found["budget"], found["tolerated"] - 1
    said = f"{found['gpu']}: if the service's latency may rise by {more:.0%}, {found['be']} may overlap it"
    if not chosen["overlap"]:
        return f"{said} at none of the duty cycles: leave `overlap` at 0%"
    return (
        f"{said} for {chosen['overlap']:.0%} of the time on {chosen['be_sms']:.0%} of the SMs, "
        f"at {chosen['gb_per_s']:.0f} GB/s.\nSet `colocation: {{overlap: {100 * chosen['overlap']:.0f}%}}` "
        "in the agent's file, and start the best-effort work with "
        f"`cotenant run --best-effort --mechanism mps --limit {chosen['be_sms']:.0%}`"
    )
