"""`cotenant profile llm URL --model NAME --out FILE`: measure prefill and decode of a running engine through its
API.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cotenant.core.errors import check_choice

if TYPE_CHECKING:
    from cotenant.cli.progress import Tick


def llm(
    url: Annotated[str, typer.Argument(help="http://HOST:PORT of an engine with OpenAI's API.")],
    model: Annotated[str, typer.Option(help="Name of the model at the engine and in the profile.")],
    out: Annotated[str, typer.Option(help="Profile to write; an existing one gets a further model.")],
    rounds: Annotated[
        int, typer.Option(min=2, max=100, help="Least repetitions of each point that count.")
    ] = 5,
    endpoint: Annotated[str, typer.Option(help="API to use: completions or chat.")] = "completions",
    kv_tokens: Annotated[
        int, typer.Option(min=1, help="Capacity of the engine's KV cache in tokens, as the engine reports it.")
    ] = 100_000,
    step_tokens: Annotated[
        int, typer.Option(min=1, help="Largest number of tokens per step (the engine's max_num_batched_tokens).")
    ] = 8192,
    max_sequences: Annotated[
        int, typer.Option(min=1, help="Largest number of requests per step (the engine's max_num_seqs).")
    ] = 256,
    gpu: Annotated[str, typer.Option(help="Name of the GPU in the profile.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and of their order.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Measure prefill time by tokens and decode time by batch and context on an otherwise idle engine, and write the
    profile that `simulate --serving`, `plan` and `timed-llm` read.
    """
    import json
    import sys
    from pathlib import Path

    from cotenant.cli.progress import jobs_progress
    from cotenant.core.extras import require
    from cotenant.core.files import check_writable

    require("serve", "numpy", "httptools", "orjson")
    from cotenant.loadgen.llm_profiling import Profiling, limits, measure
    from cotenant.loadgen.openai import PATHS
    from cotenant.loadgen.target import parse_target
    from cotenant.profiles.llm.files import add_row, read_profiles, row_of
    from cotenant.profiles.llm.profile import LlmProfile

    check_writable(out)
    if Path(out).exists():
        read_profiles(out)  # a file that cannot get the model is refused before the measurements, which take minutes
    check_choice(endpoint, PATHS, "endpoint")
    target = parse_target(url)
    most = limits(target, model) or 8192
    work = Profiling(target, model, most, kv_tokens, rounds, endpoint, seed, max_sequences)
    count = len(work.cells())
    each = f"{count * (rounds + 1)} measurements, {count} in each of {rounds + 1} rounds"
    print(f"{model}: {each}: one to warm up, which does not count, and {rounds} that count", file=sys.stderr)
    with jobs_progress(f"profiling {model}", count * (rounds + 1)) as tick:
        found = measure(work, _with_estimate(tick, model, count))
    profile = LlmProfile(
        model, found.times, kv_tokens, step_tokens, max_sequences, most, gpu=gpu, request_s=found.request_s
    )  # fmt: skip
    measured = found.measured() | {"rounds": rounds, "seed": seed, "url": str(target)}
    add_row(out, profile, measured)
    if warning := found.warning():
        print(f"note: {warning}", file=sys.stderr)
    if as_json:
        print(json.dumps(row_of(profile, measured)))
        return
    t = found.times
    print(f"{found.request_s * 1e3:.2f} ms of a request outside of steps (HTTP, tokenizing)")
    print(f"prefill {t.prefill_base * 1e3:.2f} ms + {t.per_token * 1e3:.4f} ms per token")
    print(
        f"decode {t.decode_base * 1e3:.2f} ms + {t.per_sequence * 1e3:.3f} ms per request + "
        f"{t.per_context * 1e6:.4f} us per token of context"
    )
    wide = max(point.width for point in found.points)
    most = max(len(point.seconds) for point in found.points)
    times = f"measured {rounds} times" if most == rounds else f"measured {rounds} to {most:,} times"
    most_off = f"residuals up to {found.worst:.1%}, 95 % intervals up to {wide:.1%} wide"
    print(f"{len(found.points)} points {times}, {most_off}")
    print(f"wrote {model} to {out}")


def _with_estimate(tick: Tick, model: str, count: int) -> Tick:
    """Return `tick`, which also prints how long the other rounds will take when the first one, of `count` measurements,
    has ended. On a terminal the bar shows that.
    """
    import sys
    import time

    from cotenant.core.units import format_seconds

    began_s = time.monotonic()

    def told(done: int, of: int) -> None:
        tick(done, of)
        if done == count and not sys.stderr.isatty():
            left_s = (time.monotonic() - began_s) * (of / count - 1)
            text = format_seconds(round(left_s, 1) if left_s < 90 else 60 * round(left_s / 60))
            print(f"{model}: the warm-up round has ended, about {text} left", file=sys.stderr, flush=True)

    return told
