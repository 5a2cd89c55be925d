"""`cotenant bench gateway`."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def gateway(
    systems: Annotated[str, typer.Option(metavar="LIST", help="cotenant,asgi-inline,ray-serve")] = "",
    connections: Annotated[int, typer.Option(help="Clients that each wait for their answer.")] = 16,
    seconds: Annotated[float, typer.Option(help="Length of a round.")] = 2.0,
    rounds: Annotated[int, typer.Option(help="Rounds of each, taking turns; medians are reported.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """What a gateway with worker processes costs: the same small ONNX model behind Cotenant, inside a bare ASGI app,
    and behind Ray Serve where that is installed; same cores, same client, one run."""
    import sys

    from cotenant.bench.gateway import SYSTEMS, measure
    from cotenant.core.errors import InputError
    from cotenant.core.extras import require

    chosen = tuple(systems.split(",")) if systems else SYSTEMS
    unknown = [name for name in chosen if name not in SYSTEMS]
    if unknown:
        raise InputError(f"unknown system {unknown[0]!r}; known: {', '.join(SYSTEMS)}", field="--systems")
    if not (1 <= connections <= 1000 and 0.2 <= seconds <= 600 and 1 <= rounds <= 100):
        raise InputError("1 to 1000 connections, 0.2 to 600 seconds and 1 to 100 rounds", field="--connections")
    require("serve", "httptools", "hpack", "google.protobuf", "onnxruntime")
    result = measure(chosen, connections, seconds, rounds, lambda text: print(text, file=sys.stderr, flush=True))
    if as_json:
        print(json.dumps(result))
        return
    for name in chosen:
        if name not in result:
            continue
        own = result[name]
        forms = [(f"{name}, {form}", own[form]) for form in ("binary", "grpc") if form in own]
        for label, row in [(name, own), *forms]:
            cpu = f"   {row['cpu_us_per_request']:.0f} us of CPU a request" if "cpu_us_per_request" in row else ""
            times = f"p50 {row['p50_ms']:6.2f}   p99 {row['p99_ms']:6.2f} ms"
            print(f"{label:17} {row['rps']:8.0f} requests/s   {times}{cpu}")
    for name, ratio in result.get("ratio", {}).items():
        print(f"cotenant / {name}: {ratio:.2f}")
