"""`cotenant load --openai URL`: requests to language models, and their TTFT, TPOT and goodput."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.llm_setup import (
    ArrivalsSpec,
    Duration,
    Keep,
    Output,
    Prompt,
    Rate,
    Seed,
    Speed,
    Start,
    TraceSpec,
    build_trace,
)

if TYPE_CHECKING:
    from cotenant.loadgen.loop import Loop
    from cotenant.loadgen.openai import OpenAiResult

app = typer.Typer(add_completion=False)


@app.command()
def load(
    openai: Annotated[str, typer.Option(help="http://HOST:PORT, of an engine or of `cotenant serve MODELS.yaml`.")],
    model: Annotated[list[str] | None, typer.Option(help="Models to ask, by default all. Repeatable.")] = None,
    ttft: Annotated[list[str] | None, typer.Option(help="MS, or NAME=MS: promise of the first token.")] = None,
    tpot: Annotated[list[str] | None, typer.Option(help="MS, or NAME=MS: promise of the time per token.")] = None,
    trace: TraceSpec = None,
    rate: Rate = None,
    prompt: Prompt = "512",
    output: Output = "128",
    arrivals: ArrivalsSpec = "poisson",
    duration: Duration = None,
    start: Start = "0s",
    speed: Speed = 1.0,
    keep: Keep = "100%",
    seed: Seed = 0,
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    extra: Annotated[str, typer.Option(help="JSON of fields that every request has.")] = '{"ignore_eos": true}',
    check: Annotated[bool, typer.Option("--check", help="Answers must be those of timed engines.")] = False,
    timeout: Annotated[str, typer.Option(help="An answer later than this has failed.")] = "600s",
    connections: Annotated[int, typer.Option(min=1, max=60000, help="Most at once.")] = 1024,
    token: Annotated[Path | None, typer.Option(metavar="FILE", help="File with the bearer token to show.")] = None,
    cafile: Annotated[str | None, typer.Option(help="Certificates to trust.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Trust any certificate.")] = False,
    csv: Annotated[str | None, typer.Option(help="Every request, as the client saw it.")] = None,
    html: Annotated[str | None, typer.Option(help="Write a self-contained report page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Drive language models behind OpenAI's API with streams, open loop: requests leave when they are due, whatever the
    answers do, and TTFT counts from then."""
    import json

    from cotenant.cli.token_file import shown_token
    from cotenant.core.errors import InputError
    from cotenant.core.files import check_writable
    from cotenant.core.units import parse_seconds
    from cotenant.loadgen.openai import PATHS, OpenAiTest, ask_models, promises, run_openai
    from cotenant.loadgen.target import parse_target

    for path in (csv, html):
        if path is not None:
            check_writable(path)
    if endpoint not in PATHS:
        raise InputError(f"{endpoint!r} is not {' or '.join(PATHS)}", field="endpoint")
    fields = _fields(extra)
    target = parse_target(openai, shown_token(token), cafile, insecure)
    if target.is_grpc:
        raise InputError("OpenAI's API is HTTP; write http://HOST:PORT", field="openai")
    names = model or ask_models(target)
    requests = build_trace(names, trace, rate, prompt, output, arrivals, duration, start, speed, keep, seed)
    test = OpenAiTest(
        target, requests, promises(names, _targets(ttft, "ttft", names), _targets(tpot, "tpot", names)), endpoint,
        fields, check, parse_seconds(timeout, field="timeout"), connections, seed,
    )  # fmt: skip
    result = run_openai(test, None if as_json else _lines(requests.span_s))
    _report(result, csv, html, json.dumps(result.summary()) if as_json else None)


def _fields(text: str) -> dict[str, Any]:
    import json

    from cotenant.core.errors import InputError

    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(f"{text!r} is not a JSON object", field="extra")
    return found


def _targets(given: list[str] | None, field: str, names: list[str]) -> dict[str, float]:
    """NAME=MS, or MS for all."""
    from cotenant.core.errors import InputError

    found: dict[str, float] = {}
    for text in given or []:
        name, _, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if not 0 < value < 1e9 or (name and name not in names):
            raise InputError(f"{text!r} is not MS or NAME=MS with a name of {', '.join(names)}", field=field)
        found[name] = value
    return found


def _lines(span_s: float) -> Any:
    """A line per minute on standard error."""
    import sys

    last = 0.0

    def tell(loop: Loop) -> None:
        nonlocal last
        now = loop.now()
        if now - last >= 60:
            last = now
            print(f"sending: {now:.0f} of {span_s:.0f} s, {loop.done:,} answers", file=sys.stderr, flush=True)

    return tell


def _report(result: OpenAiResult, csv: str | None, html: str | None, as_json: str | None) -> None:
    import sys

    from cotenant.cli.llm_view import show
    from cotenant.core.files import atomic_file

    if csv is not None:
        with atomic_file(csv) as file:
            file.write(result.times.csv(result.test.trace.models))
    if html is not None:
        from cotenant.report.llm import write_page

        write_page(html, result)
    if as_json is not None:
        print(as_json)
    else:
        content = result.summary()
        late = content["lateness_ms"]
        left = "" if late["p50"] is None else f", sent {late['p50']:.2f} ms after their time (p99 {late['p99']:.2f})"
        show(content, f"{len(result.outcome):,} requests in {result.duration_s:.1f} s, seed {result.test.seed}{left}")
    for reason, count in list(result.reasons.items())[:10]:
        print(f"note: {count:,} requests: {reason}", file=sys.stderr)
