"""`cotenant infer MODEL`: load one model on a share of this machine and measure it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.agent.mechanisms.base import Use
from cotenant.serving.config import backends

if TYPE_CHECKING:
    from collections.abc import Callable

    from cotenant.serving.workers.onemodel import OneModel

app = typer.Typer(add_completion=False)
MOST = 10_000_000
MECHANISMS = "|".join(mechanisms.names(Use.PROFILE))


@app.command()
def infer(
    model: Annotated[
        str, typer.Argument(help=f"Model folder: NAME/VERSION/FILE, where FILE is one of {backends.files()}.")
    ],
    count: Annotated[int, typer.Option(min=1, max=MOST, help="Number of batches.")] = 1000,
    batch: Annotated[int, typer.Option(min=1, max=1024, help="Items per batch.")] = 1,
    interval: Annotated[str, typer.Option(help="Interval between batches; 0s runs them back to back.")] = "0s",
    share: Annotated[str, typer.Option(help="Share of the machine's cores, or of the GPU.")] = "100%",
    mechanism: Annotated[
        str, typer.Option(metavar=MECHANISMS, help="What the share is a part of: the machine's CPU cores or the GPU.")
    ] = "cores",
    backend: Annotated[
        str, typer.Option(metavar="|".join(backends.names()), help="Inference backend.")
    ] = backends.AUTO,
    shape: Annotated[list[str] | None, typer.Option(help="INPUT=3x224x224, for models that accept any size.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random input.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Run one model on a share and report its loading time, latency percentiles and throughput. The input is random."""
    import json

    from cotenant.core.errors import InputError
    from cotenant.core.units import parse_fraction, parse_seconds
    from cotenant.loadgen.options import parse_shapes
    from cotenant.serving.workers.onemodel import OneModel, find_model, local_factory

    fraction, gap_s = parse_fraction(share, field="share"), parse_seconds(interval, field="interval")
    if fraction <= 0:
        raise InputError("a share of 0 % runs nothing", field="share")
    capabilities = mechanisms.find(mechanism, Use.PROFILE).capabilities
    backends.check(backend)
    name, found = find_model(model, backend)
    sizes = dict(parse_shapes(shape or []))

    async def whole() -> dict[str, Any]:
        from cotenant.cli.progress import jobs_progress

        factory = local_factory(mechanism)
        try:
            with jobs_progress(f"running {name}", count) as tick:
                async with OneModel(
                    factory, name, found, fraction=fraction, partition=share, mechanism=mechanism, batch=batch,
                    seed=seed, sizes=sizes,
                ) as one:  # fmt: skip
                    if batch > 1 and not one.info.batchable:
                        raise InputError(f"{name} accepts only one item per batch", field="batch")
                    return await run_batches(one, count, batch, gap_s, tick)
        finally:
            await factory.close()

    whose = "GPU" if capabilities.needs_gpu else "cores"
    content = {"model": name, "backend": found.backend, "share": fraction, "mechanism": mechanism}
    content |= asyncio.run(whole())
    if as_json:
        print(json.dumps(content))
    else:
        show(content, whose)


async def run_batches(
    one: OneModel, count: int, batch: int, gap_s: float, tick: Callable[[int, int], None]
) -> dict[str, Any]:
    """Run batches of the model at equal intervals. Latency counts from when a batch was due, so that waiting is
    included.
    """
    import time

    import numpy as np

    await one.run(batch)  # a first batch without measurement, since it includes lazy initialization
    executed, total = np.zeros(count), np.zeros(count)
    began = time.monotonic()
    for i in range(count):
        due = began + i * gap_s if gap_s > 0 else time.monotonic()
        left = due - time.monotonic()
        if left > 0:
            await asyncio.sleep(left)
            # the delay when the sleep itself ends a little late is not part of the latency
            due = max(due, time.monotonic()) if time.monotonic() - due < 0.002 else due
        executed[i] = (await one.run(batch)).executed_ms
        total[i] = (time.monotonic() - due) * 1e3
        if i % 16 == 0:
            tick(i, count)
    took = time.monotonic() - began

    def percentiles(x: np.ndarray) -> dict[str, float]:
        p50, p95, p99 = np.percentile(x, (50, 95, 99))
        return {"p50": float(p50), "p95": float(p95), "p99": float(p99), "max": float(x.max())}

    return {
        "batches": count,
        "batch": batch,
        "load_s": one.load_s,
        "memory_mb": one.resident_bytes() / 1e6,
        "items_per_s": count * batch / took,
        "inference_ms": percentiles(executed),
        "latency_ms": percentiles(total),
    }


def show(content: dict[str, Any], whose: str) -> None:
    """Print the figures of the model. `whose`: what the share is a part of, CPU cores or GPU."""
    share = f"{content['share']:.0%} of the {whose}"
    print(f"{content['model']} ({content['backend']}) on {share}: loaded in {content['load_s']:.2f} s")
    print(f"{content['batches']:,} batches of {content['batch']}: {content['items_per_s']:,.1f} items/s")
    for name, what in (("inference_ms", "time in the model"), ("latency_ms", "latency from due time")):
        row = content[name]
        print(
            f"  {what:<21} p50 {row['p50']:.3f}  p95 {row['p95']:.3f}  p99 {row['p99']:.3f}  worst {row['max']:.3f} ms"
        )
