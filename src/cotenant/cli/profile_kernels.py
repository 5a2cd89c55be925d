"""`cotenant profile kernels`: measure times, SMs and classes of a program's kernels."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def kernels(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="A CUDA program that ends by itself.")],
    gpus: Annotated[
        str, typer.Option(metavar="soft|UUID", help="soft (the software GPU), or the UUID or index of a real GPU.")
    ] = "all",
    classes: Annotated[
        bool,
        typer.Option(
            help="Also find the resource that limits each kernel; runs the program four times instead of once."
        ),
    ] = True,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Time limit of each run.")] = "10min",
    out: Annotated[str, typer.Option(metavar="FILE.json", help="Profile to write.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Time every kernel of an unmodified program, by kernel, grid and block: duration, SMs, and the resource that
    limits it.
    """
    from cotenant.bench.kernel_profile import measure, path_of
    from cotenant.core.errors import InputError
    from cotenant.core.files import check_writable, write_text
    from cotenant.core.units import parse_seconds

    if path_of(command[0]) is None:
        raise InputError(f"{command[0]}: there is no such program", field="CMD")
    timeout_s = parse_seconds(timeout, "--timeout")
    if timeout_s <= 0:
        raise InputError("the time limit must be above 0", field="--timeout")
    if out:
        check_writable(out)
    from cotenant.devices.registry import discover

    discover([gpus])  # a wrong GPU is reported before anything starts

    def progress(text: str) -> None:
        print(f"cotenant profile: {text}", file=sys.stderr, flush=True)

    found = measure(gpus, command, classes=classes, timeout_s=timeout_s, progress=progress)
    if out:
        write_text(Path(out), json.dumps(found, indent=1))
    if as_json:
        print(json.dumps(found))
    else:
        _print(found)


def _print(found: dict[str, Any]) -> None:
    from cotenant.cli.fitting import plain_table, print_whole

    table = plain_table()
    for title in ("kernel", "grid", "count", "us", "SMs", "needs", "of the time"):
        table.add_column(title, justify="left" if title in ("kernel", "needs") else "right", no_wrap=title != "kernel")
    total = sum(row["count"] * row["duration_ns"] for row in found["kernels"])
    for row in found["kernels"][:40]:
        part = row["count"] * row["duration_ns"] / total
        grid = "x".join(map(str, row["grid"]))
        name = row["name"] if len(row["name"]) <= 60 else row["name"][:57] + "..."
        table.add_row(
            name, grid, str(row["count"]), f"{row['duration_ns'] / 1e3:.1f}", str(row["sms"]), row["work_class"],
            f"{part:.1%}",
        )  # fmt: skip
    print_whole(table)
    if len(found["kernels"]) > 40:
        print(f"and {len(found['kernels']) - 40} more")
    if found["missed"]:
        print(f"{found['missed']} launches could not be timed")
