"""`cotenant profile llm URL --model NAME --out FILE`: measure prefill and decode of a running engine through its
API.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from cotenant.core.errors import check_choice

if TYPE_CHECKING:
    from cotenant.cli.progress import Tick
    from cotenant.core.partial import Partial
    from cotenant.loadgen.llm_profiling import Samples
    from cotenant.profiles.llm.fit import Fit


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
    schedules_ahead: Annotated[
        bool,
        typer.Option(
            "--schedules-ahead",
            help="The engine decides what a step computes while the step before runs (vLLM: asynchronous scheduling; "
            "SGLang: overlap schedule), so a request also waits for a step that is decided already.",
        ),
    ] = False,
    gpu: Annotated[str, typer.Option(help="Name of the GPU in the profile.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of measurements.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Measure prefill time by tokens and decode time by batch and context on an otherwise idle engine, and write the
    profile that `simulate --serving`, `plan` and `timed-llm` read.

    An interrupted measurement continues where it stopped.
    """
    import json
    import secrets
    import sys
    from pathlib import Path

    from cotenant.cli.progress import jobs_progress
    from cotenant.core.extras import require
    from cotenant.core.files import check_writable
    from cotenant.core.partial import Partial

    require("serve", "numpy", "httptools", "orjson")
    from cotenant.loadgen.llm_profiling import MERGED, Profiling, Samples, describe, limit_of, measure
    from cotenant.loadgen.openai import PATHS
    from cotenant.loadgen.target import parse_target
    from cotenant.profiles.llm.files import add_row, read_profiles, row_of
    from cotenant.profiles.llm.profile import LlmProfile

    check_writable(out)
    if Path(out).exists():
        read_profiles(out)  # a file that cannot get the model is refused before the measurements, which take minutes
    check_choice(endpoint, PATHS, "endpoint")
    target = parse_target(url)
    engine = describe(target, model)
    most = limit_of(engine) or 8192
    # the prompts of each run are new, because the engine may have cached those of earlier ones
    work = Profiling(
        target, model, most, kv_tokens, rounds, endpoint, seed, max_sequences, secrets.randbits(40)
    )  # fmt: skip
    work.check()
    settings = {
        "url": str(target), "engine": engine, "model": model, "rounds": rounds, "endpoint": endpoint, "gpu": gpu,
        "kv-tokens": kv_tokens, "step-tokens": step_tokens, "max-sequences": max_sequences, "seed": seed,
    }  # fmt: skip
    partial = Partial(Path(out), settings)
    samples = Samples(work, partial)
    with _kept(partial):
        _say_begin(model, rounds, samples, partial)
        with jobs_progress(f"profiling {model}", samples.total) as tick:
            found = measure(work, _with_estimate(tick, model, samples), samples)
    profile = LlmProfile(
        model, found.times, kv_tokens, step_tokens, max_sequences, most, gpu=gpu, request_s=found.request_s,
        schedules_ahead=schedules_ahead,
    )  # fmt: skip
    measured = found.measured() | {"rounds": rounds, "seed": seed, "url": str(target)}
    add_row(out, profile, measured)
    partial.remove()
    if samples.tokens_each > MERGED:
        text = f"the engine sends {samples.tokens_each:.1f} tokens per event: a decode step is the mean time per token"
        print(f"note: {text}, and the whole time to the first token counts as prefill", file=sys.stderr)
    if warning := found.warning():
        print(f"note: {warning}", file=sys.stderr)
    if as_json:
        print(json.dumps(row_of(profile, measured)))
        return
    _show(found, rounds)
    print(f"wrote {model} to {out}")


def _show(found: Fit, rounds: int) -> None:
    """Print the coefficients and how well they fit. `rounds`: how often each point was measured at least."""
    t = found.times
    print(f"{found.request_s * 1e3:.2f} ms of a request outside of steps (HTTP, tokenizing)")
    least = f", at least {t.prefill_least * 1e3:.2f} ms" * bool(t.prefill_least)
    print(f"prefill {t.prefill_base * 1e3:.2f} ms + {t.per_token * 1e3:.4f} ms per token{least}")
    print(
        f"decode {t.decode_base * 1e3:.2f} ms + {t.per_sequence * 1e3:.3f} ms per request + "
        f"{t.per_context * 1e6:.4f} us per token of context"
    )
    wide = max(point.width for point in found.points)
    most = max(len(point.seconds) for point in found.points)
    times = f"measured {rounds} times" if most == rounds else f"measured {rounds} to {most:,} times"
    most_off = f"residuals up to {found.worst:.1%}, 95 % intervals up to {wide:.1%} wide"
    print(f"{len(found.points)} points {times}, {most_off}")


def _say_begin(model: str, rounds: int, samples: Samples, partial: Partial) -> None:
    """Print how many measurements there are to make, and what is used of those of an interrupted run."""
    from cotenant.cli.progress import say

    if partial.other_key is not None:
        earlier = partial.other_key if isinstance(partial.other_key, dict) else {}
        other = [name for name, value in partial.key.items() if earlier.get(name) != value]
        say(f"{partial.path} is not used and is replaced: it was measured with another {', '.join(other)}")
    if samples.kept == samples.total:
        say(f"{model}: all measurements are in {partial.path}")
        return
    if samples.kept:
        warm = f"{len(samples.warm)} are made to warm up, which do not count"
        say(f"{model}: continues with {samples.kept} measurements from {partial.path}; {warm}, and "
            f"{samples.total - samples.kept - len(samples.warm)} that count")  # fmt: skip
        return
    count = len(samples.cells)
    each = f"{count * (rounds + 1)} measurements, {count} in each of {rounds + 1} rounds"
    say(f"{model}: {each}: one to warm up, which does not count, and {rounds} that count")


@contextmanager
def _kept(partial: Partial) -> Iterator[None]:
    """Say where the measurements are if something ends the block early."""
    from cotenant.cli.progress import say
    from cotenant.core.errors import WorkError

    try:
        yield
    except (KeyboardInterrupt, WorkError):
        if partial.rows:
            say(f"what was measured is in {partial.path}: the same command continues with it")
        raise


def _with_estimate(tick: Tick, model: str, samples: Samples) -> Tick:
    """Return `tick`, which also prints how long the other rounds will take when the first one, which warms up, has
    ended. On a terminal the bar shows that.
    """
    import sys
    import time

    from cotenant.core.units import format_seconds

    began_s = time.monotonic()
    count = len(samples.warm)

    def told(done: int, of: int) -> None:
        tick(done, of)
        if done == samples.kept + count and not sys.stderr.isatty():
            left_s = (time.monotonic() - began_s) * (of - done) / count
            text = format_seconds(round(left_s, 1) if left_s < 90 else 60 * round(left_s / 60))
            print(f"{model}: the warm-up round has ended, about {text} left", file=sys.stderr, flush=True)

    return told
