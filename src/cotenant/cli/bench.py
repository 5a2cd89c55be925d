"""`cotenant bench`: benchmarks for users; each prints a ratio against a baseline measured in the same run."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from cotenant.cli.bench_budget import budget
from cotenant.cli.bench_colocation import colocation
from cotenant.cli.bench_gateway import gateway
from cotenant.cli.bench_llm import llm
from cotenant.cli.bench_pcie import pcie
from cotenant.cli.progress import say
from cotenant.core.errors import InputError, unknown_name
from cotenant.core.units import counted, parse_fraction, parse_memory, parse_seconds

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Benchmarks against a baseline measured in the same run."
)
app.command()(budget)
app.command()(colocation)
app.command()(gateway)
app.command()(llm)
app.command()(pcie)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Gpus = Annotated[
    str, typer.Option(metavar="soft|all|UUID", help="soft (the software GPU), or the UUID or index of a real GPU.")
]


def _fractions(text: str, field: str) -> list[float]:
    values = []
    for part in text.split(","):
        part = part.strip()
        # in this benchmark a plain number such as 30 means percent; `0.3` and `30%` mean the same as in all other
        # commands
        plain = part.replace(".", "", 1).isdigit() and "." not in part
        values.append(parse_fraction(f"{part}%" if plain else part, field))
    if not values:
        raise InputError("give at least one share", field=field)
    return values


@app.command()
def shares(
    requests: Annotated[
        str, typer.Option(metavar="30,70", help="Requested share of each tenant, in percent.")
    ] = "30,70",
    limits: Annotated[str, typer.Option(metavar="100,100", help="Limit of each tenant, in percent.")] = "",
    seconds: Annotated[float, typer.Option(help="Duration of the measurement.")] = 10.0,
    gpus: Gpus = "soft",
    quota: Annotated[str, typer.Option(metavar="TIME", help="Length of a turn.")] = "100ms",
    discipline: Annotated[
        str, typer.Option(metavar="NAME", help="Rule that chooses the next tenant.")
    ] = "request-limit",
    kernel: Annotated[str, typer.Option(metavar="TIME", help="Duration of one kernel (backend driver).")] = "1.6ms",
    work_in_flight: Annotated[
        str, typer.Option(metavar="TIME", help="Largest amount of work that a tenant may queue ahead.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Compare the share that each tenant gets with the share it was granted. Starts its own agent and GPU-bound
    tenants; shares are measured by completed work.
    """
    from cotenant.bench.shares import measure

    asked = _fractions(requests, "--requests")
    capped = _fractions(limits, "--limits") if limits else [1.0] * len(asked)
    if len(asked) != len(capped):
        raise InputError(
            f"{len(asked)} requests but {len(capped)} limits: give one limit per request", field="--limits"
        )
    if not 1.0 <= seconds <= 3600.0:
        raise InputError("the duration must be between 1 and 3600 seconds", field="--seconds")
    kernel_s = parse_seconds(kernel, "--kernel")
    if not 1e-6 <= kernel_s <= 1.0:
        raise InputError("the duration of a kernel must be between 1 us and 1 s", field="--kernel")
    result = measure(
        asked,
        capped,
        seconds,
        gpus=gpus,
        quota_ms=parse_seconds(quota, "--quota") * 1e3,
        kernel_ms=kernel_s * 1e3,
        discipline=discipline,
        work_in_flight_ms=parse_seconds(work_in_flight, "--work-in-flight") * 1e3 if work_in_flight else None,
    )
    if as_json:
        print(json.dumps(result))
        return
    print(f"{result['gpu']}: {seconds:g} s of {result['workload']}, turns of {result['quota_ms']:g} ms")
    for index, (granted, got) in enumerate(zip(result["granted"], result["got"], strict=True)):
        print(f"  tenant {index}: requested {asked[index]:.0%}, granted {granted:.1%}, got {got:.2%}")
    print(
        f"  all tenants together: {result['total_over_solo']:.2%} of the native run ({result['solo_rate']:.1f} units/s)"
    )
    print(
        f"  largest error in any window of {result['window_s']:g} s: "
        f"{result['worst_window_error'] * 100:.2f} percentage points"
    )


@app.command()
def swap(
    size: Annotated[str, typer.Option(metavar="24GiB", help="Bytes of GPU memory to swap out and in.")] = "1GiB",
    moves: Annotated[int, typer.Option(help="Repetitions in each direction.")] = 20,
    gpus: Gpus = "soft",
    park: Annotated[bool, typer.Option(help="Compare with the checkpoint of the CUDA driver.")] = True,
    check_every: Annotated[int, typer.Option(min=1, help="Check the contents after every N swaps.")] = 1,
    as_json: Json = False,
) -> None:
    """Measure how fast GPU memory is swapped out and in, relative to pinned copies in the same run; contents are
    checked.
    """
    from cotenant.bench.swap import measure
    from cotenant.bench.swap import text as in_words

    result = measure(
        parse_memory(size, "--size"), moves, gpus=gpus, park=park, check_every=check_every, progress=say
    )
    print(json.dumps(result) if as_json else in_words(result))


@app.command()
def overhead(
    gpus: Gpus = "soft",
    pairs: Annotated[int, typer.Option(help="Interleaved pairs of measurements per workload.")] = 30,
    block: Annotated[str, typer.Option(metavar="TIME", help="Duration of each half of a pair.")] = "200ms",
    processes: Annotated[int, typer.Option(min=1, help="Pairs of processes per workload.")] = 1,
    workloads: Annotated[str, typer.Option(metavar="LIST", help="busy,training,launch,graph")] = "",
    as_json: Json = False,
) -> None:
    """Measure the overhead for a single tenant: the same program native and as a tenant, in interleaved pairs."""
    from cotenant.bench.overhead import measure
    from cotenant.bench.workload import KINDS

    kinds = tuple(workloads.split(",")) if workloads else KINDS
    for kind in kinds:
        if kind not in KINDS:
            raise unknown_name("workload", kind, KINDS, "--workloads")
    if pairs < 6:
        raise InputError("a confidence interval needs at least 6 pairs", field="--pairs")
    block_s = parse_seconds(block, "--block")
    if not 0.001 <= block_s <= 3600.0:
        raise InputError("the duration of a block must be between 1 ms and 1 h", field="--block")

    result = measure(
        gpus=gpus,
        workloads=kinds,
        pairs=pairs,
        block_s=block_s,
        processes=processes,
        progress=say,
    )
    if as_json:
        print(json.dumps(result))
        return
    by = f"{counted(processes, 'pair')} of processes"
    print(f"{result['gpu']} ({result['backend']}): {by}, each with {pairs} pairs of blocks of {block}:")
    for kind, row in result["workloads"].items():
        low, high = row["ratio_ci95"]
        print(f"  {kind:9} tenant / native {row['ratio']:.4f}  (95 %: {low:.4f} to {high:.4f})")
