"""`cotenant profile service MODEL --out FILE`: measure a model's latency by batch and partition on this machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.agent.mechanisms.base import Use
from cotenant.serving.config import backends

if TYPE_CHECKING:
    from pathlib import Path

    from cotenant.serving.workers.profiling import ProfileRun

MECHANISMS = "|".join(mechanisms.names(Use.PROFILE))


def service(
    model: Annotated[
        str, typer.Argument(help=f"Model folder: NAME/VERSION/FILE, where FILE is one of {backends.files()}.")
    ],
    out: Annotated[str, typer.Option(help="Profile to write; an existing one gets a further model.")],
    mechanism: Annotated[
        str,
        typer.Option(
            metavar=MECHANISMS,
            help="Mechanism that gives the model a partition: of the CPU cores (cores) or of the GPU (the others).",
        ),
    ] = "cores",
    partitions: Annotated[
        str | None,
        typer.Option(help="Partitions, 50%,100% ... (default: every number of cores, or 10% to 100% of a GPU)."),
    ] = None,
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "1,2,4,8,16,32",
    seconds: Annotated[str, typer.Option(help="Time for each combination of batch and partition.")] = "500ms",
    against: Annotated[
        list[str] | None, typer.Option(help="Folder of another model, to measure their mutual slowdown. Repeatable.")
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help="INPUT=3x224x224, for models that accept any size.")] = None,
    backend: Annotated[
        str, typer.Option(metavar="|".join(backends.names()), help="Inference backend.")
    ] = backends.AUTO,
    gpu: Annotated[
        str | None, typer.Option(help="Name of the GPU in the profile (default: CPU, or the name of the GPU).")
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(help="Safety factor on every latency (default: from the spread of the measurements)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Measure latency by batch and partition, loading time, memory and interference, and write the profile that
    planners read.

    An interrupted measurement continues where it stopped.
    """
    import asyncio
    import datetime
    from pathlib import Path

    from cotenant.cli.progress import jobs_progress
    from cotenant.core.files import check_writable, write_text
    from cotenant.core.partial import Partial
    from cotenant.profiles.serving.latency_files import parse_profile
    from cotenant.serving.workers.profiling import assemble, measure

    check_writable(out)
    run = _run_of(model, mechanism, partitions, batches, seconds, against or [], shape or [], backend, gpu, margin)
    target = Path(out)
    earlier = _earlier(target)
    partial = Partial(target, run.key)
    with jobs_progress(f"profiling {run.name}", len(run.cells)) as tick:
        rows = asyncio.run(measure(run, partial, tick))
    profile = assemble(run, rows, earlier, datetime.date.today().isoformat())
    parse_profile(profile, out)  # a profile that could not be read again is reported before the file is written
    write_text(out, json.dumps(profile, indent=1) + "\n")
    partial.remove()
    found = _summary(run, rows, profile)
    if as_json:
        print(json.dumps(found))
    else:
        _show(run, found, out)


def _run_of(
    model: str, mechanism: str, partitions: str | None, batches: str, seconds: str, against: list[str],
    shape: list[str], backend: str, gpu: str | None, margin: float | None,
) -> ProfileRun:  # fmt: skip
    import math

    from cotenant.core.errors import InputError
    from cotenant.core.units import parse_fraction, parse_seconds
    from cotenant.loadgen.options import parse_shapes
    from cotenant.serving.workers.onemodel import find_model
    from cotenant.serving.workers.profiling import ProfileRun, core_partitions

    capabilities = mechanisms.find(mechanism, Use.PROFILE).capabilities
    backends.check(backend)
    if margin is not None and not (math.isfinite(margin) and 1 <= margin <= 100):
        raise InputError(f"margin must be between 1 and 100, not {margin:g}", field="margin")
    sizes = batches.split(",")
    if not all(b.strip().isdigit() and 1 <= int(b) <= 1024 for b in sizes):
        raise InputError(f"{batches!r} is not a list of batch sizes such as 1,2,4,8", field="batches")
    if partitions is None:
        labels = (
            {f"{p}%": p / 100 for p in (10, 20, 40, 50, 60, 80, 100)} if capabilities.needs_gpu else core_partitions()
        )
    else:
        fractions = [parse_fraction(p.strip(), field="partitions") for p in partitions.split(",")]
        if not all(0 < f <= 1 for f in fractions):
            raise InputError("a partition of 0 % runs nothing", field="partitions")
        labels = {f"{round(f * 100, 4):g}%": f for f in fractions}
    if gpu is None:
        gpu = _gpu_name() if capabilities.needs_gpu else "CPU"
    name, found = find_model(model, backend)
    return ProfileRun(
        name, found, mechanism, labels, tuple(sorted({int(b) for b in sizes})), parse_seconds(seconds, "seconds"),
        tuple(find_model(x) for x in against), dict(parse_shapes(shape)), gpu, margin,
    )  # fmt: skip


def _gpu_name() -> str:
    from cotenant.serving.workers.devices import visible_gpus

    return visible_gpus()[0].name


def _earlier(path: Path) -> dict[str, Any] | None:
    from cotenant.profiles.serving.latency_files import profile_to_dict, read_profile

    if not path.exists():
        return None
    read_profile(path)
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    found = profile_to_dict(read_profile(path))
    return {**found, "models": content["models"]}


def _summary(run: ProfileRun, rows: dict[str, Any], profile: dict[str, Any]) -> dict[str, Any]:
    model = profile["models"][run.name]
    return {
        "model": run.name,
        "gpu": run.gpu,
        "latency_ms": model["latency_ms"],
        "overhead_ms": model["overhead_ms"],
        "margin": profile["margin"],
        "load_s": min(rows["memory"]["load_s"]),
        "memory_mb": model["memory_mb"],
        "beside": {n.removeprefix("beside/"): row for n, row in rows.items() if n.startswith("beside/")},
    }


def _show(run: ProfileRun, found: dict[str, Any], out: str) -> None:
    from cotenant.cli.fitting import plain_table, print_fitting

    labels = list(found["latency_ms"])

    def build(heads: Any) -> Any:
        table = plain_table()
        for head in ("batch", *heads):
            table.add_column(head, justify="right", no_wrap=True)
        for batch in map(str, run.batches):
            cells = {label: f"{found['latency_ms'][label][batch]:.3f}" for label in labels}
            cells["hand-over"] = f"{found['overhead_ms'][batch]:.3f}"
            table.add_row(batch, *(cells[head] for head in heads))
        return table

    print(f"{run.name} on {run.gpu}: ms per batch, by partition")
    print_fitting(build, build, [*labels, "hand-over"], labels[1:])
    print(
        f"loads in {found['load_s']:.2f} s, {found['memory_mb']:.0f} MB; the profile multiplies "
        f"latencies by {found['margin']:g}"
    )
    for name, row in found["beside"].items():
        print(f"together with {name}: slowed by x{row['slowdown']:.2f}, slows the other by x{row['slows_it']:.2f}")
    print(f"written to {out}")
