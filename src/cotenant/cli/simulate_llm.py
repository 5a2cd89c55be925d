"""`cotenant simulate --serving MODELS.yaml`: language models on shared GPUs, in virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.llm_setup import (
    Profiles,
    Requests,
    build_setup,
    build_trace,
    fitting,
    gpu_memory,
    profiles_of,
    takes_requests,
    times_content,
    times_sentence,
)

if TYPE_CHECKING:
    from cotenant.sim.llm.engine import LlmResult

app = typer.Typer(add_completion=False)


@app.command()
@takes_requests
def simulate(
    requests: Requests,
    models: Annotated[str, typer.Argument(help="Models file, the same as for `cotenant serve`.")],
    serving: Annotated[bool, typer.Option("--serving", help="Simulate requests to language models.")] = True,
    profile: Profiles = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Number of GPUs, instead of the file's.")] = None,
    sharing: Annotated[
        str,
        typer.Option(help="conserving: models may use idle GPU time of others; fixed: each has a constant fraction."),
    ] = "conserving",
    share: Annotated[
        list[str] | None, typer.Option(help="NAME=50%: weight of a model, or its fraction. Repeatable.")
    ] = None,
    start_up: Annotated[
        str | None, typer.Option("--start-up", help="Time that a model's program takes to start (default: 30s).")
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Start with no model on the GPUs.")] = False,
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-cache", help="Tokens that a trace marks as cached need no prefill.")
    ] = False,
    csv: Annotated[
        str | None, typer.Option(help="Write one row per request: when it was due, its first and its last token.")
    ] = None,
    html: Annotated[str | None, typer.Option(help="Write a self-contained report page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Simulate requests to language models on shared GPUs: iteration-level batching, KV memory, and models that are
    swapped.

    Reports TTFT, TPOT, attainment of ttft_ms and tpot_ms, goodput, switches and GPU utilisation.
    """
    del serving
    import contextlib
    import json
    import sys

    from cotenant.cli.llm_view import show
    from cotenant.core.files import check_writable, write_text
    from cotenant.core.units import counted, parse_seconds
    from cotenant.serving.config.models import check_kept, read_models

    check_writable(csv, html)
    config = read_models(models, starts=False)
    start_s = None if start_up is None else parse_seconds(start_up, field="start-up")
    memory = gpu_memory(config)
    with config.source.located() if config.source else contextlib.nullcontext():
        check_kept(config.models, [memory.each_bytes] * (gpus or config.raw.gpus.count))
    profiles = profiles_of(config, profile or [], memory.model)
    setup = build_setup(config, profiles, memory, gpus, sharing, share or [], not cold, prefix_cache, start_s)
    names = [m.name for m in config.models]
    trace = build_trace(names, requests)
    result = run(fitting(trace, setup.models), setup)
    content = {**result.summary(), **memory.content(), **times_content(setup), "seed": requests.seed}
    if csv is not None:
        write_text(csv, result.times.csv(names))
    if html is not None:
        from cotenant.report.llm import write_page

        write_page(html, result)
    if as_json:
        print(json.dumps(content))
        return
    show(content, f"{counted(len(trace), 'request')} of {trace.source}")
    print(memory.sentence())
    print(times_sentence(setup, memory))
    for reason, count in result.trace.left_out.items():
        print(f"note: {counted(count, 'request')} left out: {reason}", file=sys.stderr)
    most = {m.name: m.max_queue for m in config.models}
    for name, row in content["models"].items():
        if row["refused"]:
            why = f"{most[name]:,} waited already (max_queue)"
            print(f"note: {counted(row['refused'], 'request')} of {name} refused: {why}", file=sys.stderr)
        lost = row["requests"] - row["answered"] - row["refused"]
        if lost and row["answered"]:
            print(f"note: {counted(lost, 'request')} of {name} never answered", file=sys.stderr)
        if row["requests"] and not row["answered"]:
            text = f"note: no request of {name} is answered: it has no room beside models that stay, or never its turn"
            print(text, file=sys.stderr)


def run(requests: Any, setup: Any) -> LlmResult:
    """Simulate the requests to language models, with progress on a terminal."""
    from cotenant.cli.progress import jobs_progress
    from cotenant.sim.llm.engine import simulate as simulate_llm

    with jobs_progress("simulating", len(requests)) as tick:
        return simulate_llm(requests, setup, lambda done: tick(done, len(requests)))
