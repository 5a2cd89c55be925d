"""`cotenant bench colocation`: latency-sensitive beside best-effort under every scheme."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer


def colocation(
    ls: Annotated[
        str, typer.Option(metavar="MODEL:BATCH:RATE", help="The latency-sensitive service; virtual: profile:FILE:RATE.")
    ] = "resnet50:4:100",
    be: Annotated[
        str, typer.Option(metavar="LIST", help="mmN, addN, copyN, train-resnet50, train-transformer, profile:FILE.")
    ] = "mm4096,mm2048,add256,mm8192,copy2048,train-resnet50",
    schemes: Annotated[str, typer.Option(metavar="all|LIST", help="temporal,orion,mps-plus,static,tidal")] = "all",
    gpus: Annotated[
        str, typer.Option(metavar="soft|virtual|UUID", help="The software GPU, virtual time, or a real one.")
    ] = "soft",
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Interleaved rounds of blocks.")] = 5,
    block: Annotated[str, typer.Option(metavar="TIME", help="Length of a block.")] = "2s",
    seconds: Annotated[float, typer.Option(min=0.01, max=3600, help="Virtual: length of each run.")] = 3.0,
    copy_inputs: Annotated[bool, typer.Option("--copy-inputs", help="Each request brings its input.")] = False,
    interval: Annotated[str, typer.Option(metavar="TIME", help="BE work in flight, instead of the scheme's.")] = "",
    html: Annotated[str, typer.Option(metavar="FILE", help="Write a page with the plots.")] = "",
    recorded: Annotated[str, typer.Option("--from", metavar="FILE", help="Show a result that --json printed.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Run a latency-sensitive service beside best-effort programs under every scheme, and alone, in turn.

    Prints {scheme: {be: figures}}: LS percentiles against alone with a 95 % interval, requests in time, and BE work
    against what it does alone and against the time that LS leaves.
    """
    from cotenant.record.files import check_writable

    if html:
        check_writable(html)
    if recorded:
        rows = _recorded(recorded)
    elif gpus == "virtual":
        rows = _virtual(ls, be, schemes, seconds)
    else:
        rows = _real(ls, be, schemes, gpus, rounds, block, copy_inputs, interval)
    if html:
        from cotenant.report.colocation import write_page

        write_page(html, rows, f"Co-location: {ls} on {gpus}" if not recorded else f"Co-location: {recorded}")
    if as_json:
        print(json.dumps(rows))
        return
    _print(rows)


def _virtual(ls: str, be: str, schemes: str, seconds: float) -> dict[str, Any]:
    from cotenant.bench.colocation import parse_schemes
    from cotenant.bench.colocation_virtual import measure

    return measure(ls, be.split(","), parse_schemes(schemes), seconds)


def _real(
    ls: str, be: str, schemes: str, gpus: str, rounds: int, block: str, copy_inputs: bool, interval: str
) -> dict[str, Any]:
    import sys

    from cotenant.bench.colocation import Plan, measure, parse_be, parse_ls, parse_schemes
    from cotenant.model.errors import InputError
    from cotenant.model.units import parse_seconds

    block_s = parse_seconds(block, "--block")
    if not 0.1 <= block_s <= 600:
        raise InputError("a block lasts 0.1 s to 10 min", field="--block")
    changes = {"interval_ns": round(parse_seconds(interval, "--interval") * 1e9)} if interval else {}

    def progress(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    plan = Plan(
        parse_ls(ls),
        parse_be(be),
        parse_schemes(schemes),
        rounds=rounds,
        block_s=block_s,
        copy=copy_inputs,
        changes=changes,
        progress=progress,
    )
    rows: dict[str, Any] = measure(gpus, plan)["schemes"]
    return rows


def _recorded(path: str) -> dict[str, Any]:
    from pathlib import Path

    from cotenant.model.errors import InputError
    from cotenant.report.colocation import COLUMNS

    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
        complete = all(key in row for loads in rows.values() for row in loads.values() for key, _, _ in COLUMNS)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise InputError(f"not a result of this benchmark: {error}", file=path) from None
    if not complete:
        raise InputError("not a result of this benchmark: figures are missing", file=path)
    return dict(rows)


def _print(rows: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from cotenant.report.colocation import table

    head, *lines = table(rows)
    shown = Table(box=None)
    for index, title in enumerate(head):
        shown.add_column(title, justify="left" if index < 2 else "right", no_wrap=index < 2)
    for line in lines:
        shown.add_row(*line)
    Console().print(shown)
