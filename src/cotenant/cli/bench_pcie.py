"""`cotenant bench pcie`: do tenants that copy at once share the link by their weights?"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

Text = str | None


def pcie(
    weights: Annotated[str, typer.Option(metavar="1,3", help="One tenant for each.")] = "1,3",
    seconds: Annotated[float, typer.Option(help="Length of the measurement together.")] = 4.0,
    gpus: Annotated[str, typer.Option(metavar="soft|all|UUID", help="The software GPU or a real one.")] = "soft",
    direction: Annotated[str, typer.Option(metavar="h2d|d2h", help="To the GPU, or from it.")] = "h2d",
    memory: Annotated[str, typer.Option(metavar="pinned|pageable", help="Kind of host memory.")] = "pinned",
    mode: Annotated[str, typer.Option(metavar="async|sync", help="Queued on a stream, or one by one.")] = "async",
    size: Annotated[
        Text, typer.Option(metavar="SIZE", help="Of one copy (64MiB; software GPU 8MiB, pageable 2MiB).")
    ] = None,
    copy_chunk_bytes: Annotated[Text, typer.Option(metavar="SIZE", help="Pieces that copies are cut into.")] = None,
    copy_period_bytes: Annotated[Text, typer.Option(metavar="SIZE", help="What a round of all tenants moves.")] = None,
    ls: Annotated[bool, typer.Option("--ls/--no-ls", help="Also: latency-sensitive copies beside best-effort.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Shares of the PCIe link by weight, the total over a native run, and what a latency-sensitive copy waits."""
    from cotenant.agent.config.copies import with_options
    from cotenant.bench.pcie import measure, parse_weights
    from cotenant.policy.copies import CopySettings

    checked = parse_weights(weights)
    _one_of(direction, ("h2d", "d2h"), "--direction")
    _one_of(memory, ("pinned", "pageable"), "--memory")
    _one_of(mode, ("async", "sync"), "--mode")
    copies = with_options(CopySettings(), period=copy_period_bytes, chunk=copy_chunk_bytes) or CopySettings()
    result = measure(
        checked,
        gpus=gpus,
        seconds=_seconds(seconds),
        direction=direction,
        memory=memory,
        mode=mode,
        size=_size(size, gpus),
        chunk_bytes=None if copy_chunk_bytes is None else copies.chunk_bytes,
        period_bytes=None if copy_period_bytes is None else copies.period_bytes,
        ls=ls,
    )
    if as_json:
        print(json.dumps(result))
        return
    _tell(result)


def _one_of(value: str, allowed: tuple[str, ...], field: str) -> None:
    from cotenant.core.errors import InputError

    if value not in allowed:
        raise InputError(f"{value!r} is not {' or '.join(allowed)}", field=field)


def _seconds(seconds: float) -> float:
    from cotenant.core.errors import InputError

    if not 0.5 <= seconds <= 600.0:
        raise InputError("measure between 0.5 and 600 seconds", field="--seconds")
    return seconds


def _size(text: Text, gpus: str) -> int | None:
    from cotenant.core.errors import InputError
    from cotenant.core.units import parse_bytes
    from cotenant.devices.registry import device_named

    if text is None:
        return None
    size = parse_bytes(text, "--size")
    simulated = device_named(gpus).simulated
    # small ones pass without a turn; the software GPU's link moves 150 MB/s here
    most, words = (64 << 20, "64 MiB on the software GPU") if simulated else (8 << 30, "8 GiB")
    if not 128 << 10 <= size <= most:
        raise InputError(f"measure with copies of 128 KiB to {words}", field="--size")
    return size


def _tell(result: dict[str, Any]) -> None:
    link = result["native_bytes_per_s"]
    moves = f"{link / 1e9:.1f} GB/s" if link >= 1e10 else f"{link / 1e6:.0f} MB/s"
    print(f"{result['gpu']}: {result['direction']}, {result['memory']}, a native program moves {moves}")
    for weight, share in zip(result["weights"], result["shares"], strict=True):
        wanted = weight / sum(result["weights"])
        print(f"  weight {weight:g}: {share:.1%} of what was moved, {wanted:.1%} by weight")
    print(f"  together {result['total_over_link']:.1%} of the link")
    if result["ls_copy_wait_chunks"] is not None:
        copies = result["ls_beside_us"]["copies"]
        what = "p99" if copies >= 100 else f"the longest of {copies} copies"  # which is what their p99 is
        print(
            "  a latency-sensitive copy of 1 MiB beside a best-effort tenant waits"
            f" {result['ls_copy_wait_chunks']:.2f} chunks of {result['chunk_us']:.0f} us"
            f" ({what}; median {result['ls_copy_wait_chunks_median']:.2f})"
        )
