"""`cotenant probe`: what a GPU shows of itself without a driver patch."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, help="What a GPU shows of itself.")


@app.callback()
def _group() -> None:
    """What a GPU shows of itself, measured: nothing is changed on it."""


@app.command()
def channels(
    gpu: Annotated[str, typer.Option(metavar="UUID", help="Which GPU (default: the first that is visible).")] = "",
    seconds: Annotated[float, typer.Option(help="About how long to probe at most.")] = 60.0,
    colouring: Annotated[
        bool, typer.Option("--colouring", help="Also: what keeping two kernels to different channels buys (Triton).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Which lines of a 2 MiB page share a slice of the L2 cache, and with it a memory channel."""
    import os

    from cotenant.core.errors import InputError, WorkError

    if gpu == "soft":
        raise InputError("a software GPU has no memory channels: name a real one", field="--gpu")
    if not 5.0 <= seconds <= 3600.0:
        raise InputError("probe between 5 and 3600 seconds", field="--seconds")
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = _uuid(gpu)
    from cotenant.bench import channels as probing

    try:
        found = probing.probe(seconds)
    except WorkError as error:
        if "no CUDA driver" not in str(error):
            raise
        raise WorkError(
            f"{error}; this needs a real GPU (docs/benchmarks/channels.md has what an H200 showed)"
        ) from None
    if colouring:
        found["colouring"] = _colouring(seconds)
    if as_json:
        print(json.dumps(found))
        return
    _tell(found)


def _uuid(gpu: str) -> str:
    from cotenant.core.errors import InputError
    from cotenant.devices.gpus import discover

    try:
        return discover([gpu])[0].uuid
    except InputError as error:
        raise InputError(error.message, field="--gpu") from None


def _colouring(seconds: float) -> dict[str, Any]:
    from cotenant.core.errors import WorkError

    try:
        from cotenant.bench import colouring
    except ImportError as error:
        raise WorkError(f"the comparison needs PyTorch and Triton: {error}") from None
    return colouring.measure(seconds)


def _tell(found: dict[str, Any]) -> None:
    reads = found["read_clocks"]
    print(f"{found['gpu']}, one page of 2 MiB; a read from L2 takes {reads['p5']} to {reads['p95']} clocks (p5 to p95)")
    print(f"  two lines of one slice take {found['separation']:.2f} times as long as two of different slices")
    if not found["visible"]:
        print("  that is noise: no structure is visible by this method")
        return
    print(f"  {found['interleave_bytes']} bytes stay in one slice; the page has {found['groups']} groups of lines")
    print(f"  smallest span that touches all of them: {found['smallest_span_of_all_groups_bytes']} bytes")
    by_luck = found["linear_by_chance"]
    print(f"  groups follow an exclusive-or hash in {found['linear']:.0%} of cases, {by_luck:.0%} by luck")
    other = found["other_pages"]
    if other:
        print(f"  pairs that share a slice here share one in other pages: {other['same_here_share_a_slice_there']:.0%}")
    if "colouring" in found:
        print(f"  colouring: {json.dumps(found['colouring'])}")
