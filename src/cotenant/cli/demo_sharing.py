"""The part of the demo with real processes: two tenants share the software GPU."""

from __future__ import annotations

import typer

REQUESTS = (0.3, 0.7)
SECONDS = 2.5


def show_sharing(program: str) -> None:
    """Run two tenants that request 30 % and 70 % of the time on one GPU, under an agent that the demo starts.
    `program`: how the user calls cotenant.
    """
    from cotenant.bench.shares import measure
    from cotenant.core.errors import InputError, WorkError

    typer.echo("\ntwo programs share one GPU (the software GPU, on which kernels take time but compute nothing):")
    try:
        result = measure(REQUESTS, (1.0, 1.0), SECONDS, kernel_ms=4.0, work_in_flight_ms=16.0, solo_block_s=0.3)
    except (InputError, WorkError) as error:
        typer.echo(f"  left out: {error}")
        return
    for asked, got, turns in zip(REQUESTS, result["got"], result["turns"], strict=True):
        typer.echo(f"  requested {asked:.0%}, got {got:.1%} of the GPU's time in {turns} turns")
    typer.echo(f"  together {result['total_over_solo']:.1%} of the throughput of one program alone")
    typer.echo(f"try it: {program} agent --gpus soft, and in another terminal {program} run --request 30% -- CMD")
