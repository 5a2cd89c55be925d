"""`cotenant bench pcie`: shares of the PCIe link among tenants that copy concurrently."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from cotenant.core.errors import InputError, check_choice

Text = str | None


def pcie(
    weights: Annotated[str, typer.Option(metavar="1,3", help="Weights of the tenants, separated by commas.")] = "1,3",
    seconds: Annotated[float, typer.Option(help="Duration for which all tenants copy at once, in s.")] = 4.0,
    gpus: Annotated[str, typer.Option(metavar="soft|all|UUID", help="Software GPU, all GPUs, or a UUID.")] = "soft",
    direction: Annotated[
        str, typer.Option(metavar="h2d|d2h", help="Direction of the copies: to the GPU (h2d) or from it (d2h).")
    ] = "h2d",
    memory: Annotated[str, typer.Option(metavar="pinned|pageable", help="Kind of host memory.")] = "pinned",
    mode: Annotated[
        str, typer.Option(metavar="async|sync", help="Queue copies on a stream, or wait for each.")
    ] = "async",
    size: Annotated[
        Text, typer.Option(metavar="SIZE", help="Size of one copy (64MiB; software GPU: 8MiB, pageable: 2MiB).")
    ] = None,
    copy_chunk_bytes: Annotated[
        Text, typer.Option(metavar="SIZE", help="Size of the chunks into which copies are split.")
    ] = None,
    copy_period_bytes: Annotated[
        Text, typer.Option(metavar="SIZE", help="Bytes that all tenants together move in one scheduling round.")
    ] = None,
    ls: Annotated[
        bool, typer.Option("--ls/--no-ls", help="Also measure latency-sensitive copies against a best-effort tenant.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure each tenant's share of the PCIe link against its weight, the total against a native run, and the wait of
    a latency-sensitive copy.
    """
    from cotenant.agent.config.copies import with_options
    from cotenant.bench.pcie import measure, parse_weights
    from cotenant.policy.copies import CopySettings

    checked = parse_weights(weights)
    check_choice(direction, ("h2d", "d2h"), "--direction")
    check_choice(memory, ("pinned", "pageable"), "--memory")
    check_choice(mode, ("async", "sync"), "--mode")
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


def _seconds(seconds: float) -> float:
    if not 0.5 <= seconds <= 600.0:
        raise InputError("the duration must be between 0.5 and 600 seconds", field="--seconds")
    return seconds


def _size(text: Text, gpus: str) -> int | None:
    from cotenant.core.units import parse_bytes
    from cotenant.devices.registry import device_named

    if text is None:
        return None
    size = parse_bytes(text, "--size")
    simulated = device_named(gpus).simulated
    # copies below 128 KiB are not scheduled; the upper limit is lower on the software GPU, whose link copies only 150
    # MB/s
    most, words = (64 << 20, "64 MiB on the software GPU") if simulated else (8 << 30, "8 GiB")
    if not 128 << 10 <= size <= most:
        raise InputError(f"the size of a copy must be between 128 KiB and {words}", field="--size")
    return size


def _tell(result: dict[str, Any]) -> None:
    link = result["native_bytes_per_s"]
    moves = f"{link / 1e9:.1f} GB/s" if link >= 1e10 else f"{link / 1e6:.0f} MB/s"
    print(f"{result['gpu']}: {result['direction']}, {result['memory']}, a native program moves {moves}")
    for weight, share in zip(result["weights"], result["shares"], strict=True):
        wanted = weight / sum(result["weights"])
        print(f"  weight {weight:g}: {share:.1%} of the bytes, {wanted:.1%} by weight")
    print(f"  all tenants together: {result['total_over_link']:.1%} of the link")
    if result["ls_copy_wait_chunks"] is not None:
        copies = result["ls_beside_us"]["copies"]
        # with fewer than 100 copies, the p99 would be the maximum
        what = "p99" if copies >= 100 else f"the longest of {copies} copies"
        print(
            "  a latency-sensitive copy of 1 MiB against a best-effort tenant waits "
            f"{result['ls_copy_wait_chunks']:.2f} chunks of {result['chunk_us']:.0f} us ({what}; median "
            f"{result['ls_copy_wait_chunks_median']:.2f})"
        )
