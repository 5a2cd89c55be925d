"""`cotenant bench colocation`: a latency-sensitive service and best-effort programs on one GPU, under each co-location
scheme (a rule for when best-effort work may run, such as tidal).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.progress import say
from cotenant.core.errors import InputError
from cotenant.core.units import parse_fraction, parse_seconds

if TYPE_CHECKING:
    from rich.table import Table

GAP = 3  # spaces between two columns of the table
LEAST_NAME = 8  # the least width of the column with the best-effort loads
# columns that a narrow terminal leaves out, the first one first
DISPENSABLE = ("LS p50, ms", "95 %", "BE over alone", "in time", "LS p99, ms")


def colocation(
    ls: Annotated[
        str,
        typer.Option(
            metavar="MODEL:BATCH:RATE", help="The latency-sensitive service; in virtual time: profile:FILE:RATE."
        ),
    ] = "resnet50:4:100",
    be: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="mmN, mmzN, addN, copyN, train-resnet50[:BATCH], train-transformer[:BATCH], profile:FILE.",
        ),
    ] = "mm4096,mm2048,add256,mm8192,copy2048,train-resnet50",
    schemes: Annotated[str, typer.Option(metavar="all|LIST", help="temporal,orion,mps-plus,static,tidal")] = "all",
    gpus: Annotated[
        str,
        typer.Option(
            metavar="soft|virtual|UUID", help="soft, virtual (simulated time), or the UUID or index of a real GPU."
        ),
    ] = "soft",
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Rounds; each runs a block of every scheme.")] = 5,
    requests: Annotated[
        int, typer.Option(min=0, max=10**6, help="Choose the rounds so that every figure has this many requests.")
    ] = 0,
    block: Annotated[str, typer.Option(metavar="TIME", help="Duration of a block.")] = "2s",
    seconds: Annotated[float, typer.Option(min=0.01, max=3600, help="Duration of each simulated run.")] = 3.0,
    copy_inputs: Annotated[bool, typer.Option("--copy-inputs", help="Copy each request's input to the GPU.")] = False,
    in_flight_us: Annotated[
        int | None, typer.Option(min=1, max=10**6, help="In-flight budget of BE work, instead of the scheme's.")
    ] = None,
    duty_cycle: Annotated[
        str,
        typer.Option(metavar="PART", help="Scheme tidal: fraction of the LS-idle time that BE work may use."),
    ] = "",
    ls_profile: Annotated[str, typer.Option(metavar="FILE", help="Kernel profile of the service (scheme orion).")] = "",
    be_profile: Annotated[
        str, typer.Option(metavar="FILE", help="Kernel profile of the best-effort loads (scheme orion).")
    ] = "",
    html: Annotated[str, typer.Option(metavar="FILE", help="Write an HTML page with plots.")] = "",
    recorded: Annotated[str, typer.Option("--from", metavar="FILE", help="Show a result that --json wrote.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a latency-sensitive service together with each best-effort program on one GPU, under each co-location
    scheme in --schemes. The service and each program are also measured alone.

    The result has figures for each scheme and best-effort program. For the service: its latency percentiles relative to
    those of the service alone (with a 95 % interval), and the fraction of its requests within the latency target. For
    the program: its rate of work relative to its rate alone, and this ratio divided by the fraction of time in which
    the service is idle.
    """
    from cotenant.core.files import check_writable

    if html:
        check_writable(html)
    about: dict[str, str] = {}
    if recorded:
        rows = _recorded(recorded)
        about["Recorded in"] = recorded
    elif gpus == "virtual":
        given = {"--rounds": rounds != 5, "--block": block != "2s", "--copy-inputs": copy_inputs}
        given |= {"--ls-profile": bool(ls_profile), "--be-profile": bool(be_profile)}
        seconds = _virtual_seconds(ls, seconds, requests, [name for name, is_given in given.items() if is_given])
        rows = _virtual(ls, be, schemes, seconds, _changes(in_flight_us, duty_cycle))
        about |= {"On": f"simulation in virtual time, {seconds:g} s a run", "Service": _service(ls), "Beside": be}
    else:
        shape = _Shape(rounds, requests, block, copy_inputs, _changes(in_flight_us, duty_cycle), ls_profile, be_profile)
        rows, card = _real(ls, be, schemes, gpus, shape)
        about |= {"On": card, "Service": _service(ls), "Beside": be, "Measured": shape.said}
    if html:
        import datetime

        from cotenant.report.colocation import write_page

        about["Date"] = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
        if not recorded:
            about["Command"] = " ".join(["cotenant bench", *sys.argv[2:]])
        write_page(html, rows, "A latency-sensitive service with best-effort work on one GPU", about)
    if as_json:
        print(json.dumps(rows))
        return
    _print(rows)


@dataclass
class _Shape:
    """How the co-location measurement is divided into rounds and blocks. `said` describes that in words once the number
    of rounds is known.
    """

    rounds: int
    requests: int
    block: str
    copy_inputs: bool
    changes: dict[str, Any]
    ls_profile: str
    be_profile: str
    said: str = ""


def _service(ls: str) -> str:
    """Return a description in words of the latency-sensitive load, from the value of `--ls`."""
    if ls.startswith("profile:"):
        path, _, rate = ls.removeprefix("profile:").rpartition(":")
        return f"kernels of {path}, {rate} requests/s"
    _, batch, rate = ls.split(":")
    return f"ResNet-50 in fp16, batch {batch}, {rate} requests/s (Poisson)"


def _changes(in_flight_us: int | None, duty_cycle: str) -> dict[str, Any]:
    """Return the settings that override those of every co-location scheme."""
    from cotenant.policy.colocation import ColocationSettings

    changes: dict[str, Any] = {}
    if in_flight_us:
        changes["in_flight_us"] = in_flight_us
    if duty_cycle:
        changes["duty_cycle"] = parse_fraction(duty_cycle, "--duty-cycle")
    ColocationSettings(**changes)
    return changes


def _virtual_seconds(ls: str, seconds: float, requests: int, foreign: list[str]) -> float:
    """Return the duration of each simulated run in s. Raises InputError for options that only real measurements have.
    """
    from cotenant.bench.colocation_virtual import ls_work

    if foreign:
        raise InputError(
            "has no effect in virtual time, where the service is profile:FILE:RATE; leave this out",
            field=foreign[0],
        )
    return requests / ls_work(ls)[1] if requests else seconds


def _virtual(ls: str, be: str, schemes: str, seconds: float, changes: dict[str, Any]) -> dict[str, Any]:
    from cotenant.bench.colocation import parse_schemes
    from cotenant.bench.colocation_virtual import measure

    return measure(ls, be.split(","), parse_schemes(schemes), seconds, changes=changes, progress=say)


def _real(ls: str, be: str, schemes: str, gpus: str, shape: _Shape) -> tuple[dict[str, Any], str]:
    import math
    from pathlib import Path

    from cotenant.agent.config.kernel_table import compiled, most_class
    from cotenant.bench.colocation import Plan, measure, parse_be, parse_ls, parse_schemes
    from cotenant.profiles.kernels.profile import read_kernel_rows

    block_s = parse_seconds(shape.block, "--block")
    if not 0.1 <= block_s <= 600:
        raise InputError("the duration of a block must be between 0.1 s and 10 min", field="--block")
    load = parse_ls(ls)
    from cotenant.devices.registry import discover

    discover([gpus])  # a wrong GPU is reported before anything starts
    if shape.requests:
        shape.rounds = math.ceil(shape.requests / (load.rate_rps * block_s))
    plan = Plan(
        load,
        parse_be(be),
        parse_schemes(schemes),
        rounds=shape.rounds,
        block_s=block_s,
        copy=shape.copy_inputs,
        changes=shape.changes,
        ls_class=most_class(read_kernel_rows(Path(shape.ls_profile))) if shape.ls_profile else "unknown",
        be_kernels=compiled(read_kernel_rows(Path(shape.be_profile))) if shape.be_profile else "",
        progress=say,
    )
    found = measure(gpus, plan)
    shape.said = f"{shape.rounds} rounds of interleaved blocks of {block_s:g} s, with the same arrivals in each block"
    rows: dict[str, Any] = found["schemes"]
    return rows, str(found.get("gpu", gpus))


def _recorded(path: str) -> dict[str, Any]:
    from cotenant.core.jsonfile import read_json
    from cotenant.report.colocation import COLUMNS

    rows = read_json(path)
    try:
        complete = all(key in row for loads in rows.values() for row in loads.values() for key, _, _ in COLUMNS)
    except (AttributeError, TypeError):
        raise InputError("not a result of this benchmark: expected {scheme: {load: figures}}", file=path) from None
    if not complete:
        raise InputError("not a result of this benchmark: figures are missing", file=path)
    return dict(rows)


def _print(rows: dict[str, Any]) -> None:
    from rich.console import Console

    from cotenant.cli.fitting import FILE_WIDTH, fit, plain_table, to_file
    from cotenant.core.print_table import print_table
    from cotenant.report.colocation import notes, table

    head, *lines = table(rows, ("ls_p99_over_alone",))
    console = Console(width=FILE_WIDTH) if to_file() else Console()
    cells = [max(len(line[i]) for line in lines) for i in range(len(head))]
    widths = [max(len(title), width) for title, width in zip(head, cells, strict=True)]
    if sum(widths) + GAP * (len(head) - 1) > console.width:  # headings then have several lines
        widths = [max(width, *map(len, title.split())) for title, width in zip(head, cells, strict=True)]

    def build(heads: Sequence[str]) -> Table:
        at = [head.index(title) for title in heads]
        # only cells of the first column may be folded into several lines
        room = console.width - sum(widths[i] for i in at[1:]) - GAP * (len(at) - 1)
        shown = plain_table()
        for i in at:
            width = widths[i] if i else min(widths[0], max(LEAST_NAME, room))
            shown.add_column(head[i], justify="left" if i < 2 else "right", overflow="fold", width=width)
        for line in lines:
            shown.add_row(*(line[i] for i in at))
        return shown

    shown, left_out = fit(build, head, DISPENSABLE, console.width)
    print_table(console, shown)
    if left_out:
        text = f"left out at {console.width} columns: {'; '.join(left_out)}; a wider terminal shows them"
        console.print(text, style="dim", highlight=False)
    for note in notes(rows):
        console.print(note, style="dim", soft_wrap=True)
