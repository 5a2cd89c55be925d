"""`cotenant bench gateway`: the overhead of the gateway and its worker processes."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from cotenant.cli.progress import say


def gateway(
    systems: Annotated[str, typer.Option(metavar="LIST", help="cotenant,asgi-inline,ray-serve")] = "",
    connections: Annotated[int, typer.Option(help="Concurrent clients, each with one request at a time.")] = 16,
    seconds: Annotated[float, typer.Option(help="Duration of a round.")] = 2.0,
    rounds: Annotated[int, typer.Option(help="Rounds per system, interleaved; medians are reported.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the overhead of a gateway with worker processes: the same small ONNX model served by Cotenant, by a bare
    ASGI app and, if installed, by Ray Serve, on the same cores with the same client.
    """

    from cotenant.bench.gateway import SYSTEMS, measure
    from cotenant.core.errors import InputError, unknown_name
    from cotenant.core.extras import require

    chosen = tuple(systems.split(",")) if systems else SYSTEMS
    unknown = [name for name in chosen if name not in SYSTEMS]
    if unknown:
        raise unknown_name("system", unknown[0], SYSTEMS, "--systems")
    if not (1 <= connections <= 1000 and 0.2 <= seconds <= 600 and 1 <= rounds <= 100):
        raise InputError("connections must be 1 to 1000, seconds 0.2 to 600 and rounds 1 to 100", field="--connections")
    require("serve", "httptools", "hpack", "google.protobuf", "onnxruntime")
    result = measure(chosen, connections, seconds, rounds, say)
    if as_json:
        print(json.dumps(result))
        return
    for name in chosen:
        if name not in result:
            continue
        own = result[name]
        forms = [(f"{name}, {form}", own[form]) for form in ("binary", "grpc") if form in own]
        for label, row in [(name, own), *forms]:
            cpu = f"   {row['cpu_us_per_request']:.0f} us of CPU per request" if "cpu_us_per_request" in row else ""
            times = f"p50 {row['p50_ms']:6.2f}   p99 {row['p99_ms']:6.2f} ms"
            print(f"{label:17} {row['rps']:8.0f} requests/s   {times}{cpu}")
    for name, ratio in result.get("ratio", {}).items():
        print(f"cotenant / {name}: {ratio:.2f}")
