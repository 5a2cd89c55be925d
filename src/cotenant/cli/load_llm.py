"""`cotenant load --openai URL`: send requests to language models and report TTFT, TPOT and goodput."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.llm_setup import DEFAULT_S, Requests, build_trace, rates_of, takes_requests
from cotenant.cli.shared_options import SEARCH, TokenFile, Tolerance, shown_token
from cotenant.core.errors import InputError, WorkError, check_choice
from cotenant.core.files import check_writable, write_text
from cotenant.core.units import number_or_nan

if TYPE_CHECKING:
    from cotenant.loadgen.loop import Loop
    from cotenant.loadgen.openai import OpenAiResult, OpenAiTest
    from cotenant.loadgen.search import Found, Probe

app = typer.Typer(add_completion=False)


@app.command()
@takes_requests
def load(
    requests: Requests,
    openai: Annotated[str, typer.Option(help="http://HOST:PORT of an engine or of `cotenant serve MODELS.yaml`.")],
    model: Annotated[
        list[str] | None, typer.Option(help="Models to send requests to (default: all). Repeatable.")
    ] = None,
    ttft: Annotated[list[str] | None, typer.Option(help="SLO of the time to the first token: MS, or NAME=MS.")] = None,
    tpot: Annotated[list[str] | None, typer.Option(help="SLO of the time per output token: MS, or NAME=MS.")] = None,
    find_max: Annotated[
        bool,
        typer.Option("--find-max", help="Find the largest load at which the SLOs are met.", rich_help_panel=SEARCH),
    ] = False,
    attain: Annotated[
        str, typer.Option("--target", help="SLO attainment that every model must reach.", rich_help_panel=SEARCH)
    ] = "99%",
    probe: Annotated[str, typer.Option(help="Duration of one probe of the search.", rich_help_panel=SEARCH)] = "30s",
    tolerance: Tolerance = "5%",
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    extra: Annotated[str, typer.Option(help="JSON object of fields to add to every request.")] = '{"ignore_eos": true}',
    check: Annotated[
        bool, typer.Option("--check", help="Check that each answer belongs to its request (engine timed-llm).")
    ] = False,
    timeout: Annotated[str, typer.Option(help="Requests without an answer after this time count as failed.")] = "600s",
    connections: Annotated[int, typer.Option(min=1, max=60000, help="Largest number of connections.")] = 1024,
    token: TokenFile = None,
    cafile: Annotated[str | None, typer.Option(help="CA certificates to trust.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Accept any TLS certificate.")] = False,
    csv: Annotated[str | None, typer.Option(help="Write one row per request, as seen by the client.")] = None,
    html: Annotated[str | None, typer.Option(help="Write a self-contained report page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Send streaming requests to language models through OpenAI's API. Each request is sent when it is due, even if
    earlier ones have not been answered (an open loop), and its TTFT counts from the due time. With --arrivals closed:N
    each model always has N requests in flight instead."""
    from dataclasses import replace

    from cotenant.core.units import parse_fraction, parse_seconds
    from cotenant.loadgen.model_list import ask_models, check_models
    from cotenant.loadgen.openai import PATHS, OpenAiTest, promises, run_openai
    from cotenant.loadgen.target import parse_target
    from cotenant.workloads.llm.drawn import draw_pool

    check_writable(csv, html)
    check_choice(endpoint, PATHS, "endpoint")
    fields = _fields(extra)
    target = parse_target(openai, shown_token(token), cafile, insecure)
    if target.is_grpc:
        raise InputError("OpenAI's API is HTTP; write http://HOST:PORT", field="openai")
    if model:
        check_models(target, model)  # before the requests, which would all fail
    names = model or ask_models(target)
    clients = _clients(requests.arrivals, requests.rate)
    length_s = DEFAULT_S if requests.duration is None else parse_seconds(requests.duration, field="duration")

    def made(factor: float, number: int, probe_s: float | None) -> OpenAiTest:
        """Build the load scaled by `factor`. Each `number` gives other random requests. `probe_s`: duration of a
        probe."""
        seed = requests.seed + number
        if clients and requests.trace is None:
            trace = draw_pool(names, requests.prompt, requests.output, seed)
        else:
            cut = requests.duration
            if probe_s is not None:
                cut = f"{probe_s * (requests.speed * factor if requests.trace else 1.0)}s"
            arrivals = "poisson" if clients else requests.arrivals
            trace = build_trace(names, replace(requests, arrivals=arrivals, duration=cut, seed=seed), factor)
        return replace(
            test, trace=trace, seed=seed, clients=round(clients * factor), duration_s=probe_s or length_s
        )  # fmt: skip

    test = OpenAiTest(
        target, draw_pool(names, "1", "1"),
        promises(names, _targets(ttft, "ttft", names), _targets(tpot, "tpot", names)), endpoint, fields, check,
        parse_seconds(timeout, field="timeout"), connections,
    )  # fmt: skip
    if find_max:
        if not (ttft or tpot):
            raise InputError("there is no SLO to meet; give --ttft or --tpot", field="find-max")
        options = parse_fraction(attain, "target"), parse_fraction(tolerance, "tolerance")
        found = _search(made, clients, *options, parse_seconds(probe, field="probe"))
        given = made(1.0, 0, None)
        asked_rps = sum(rates_of(names, requests.rate or [])) or len(given.trace) / max(given.trace.span_s, 1e-3)
        _report_search(found, clients, asked_rps, csv, html, as_json)
        return
    test = made(1.0, 0, None)
    span_s = test.duration_s if clients else test.trace.span_s
    with _interruptible() as on_loop:
        result = run_openai(test, None if as_json else _lines(span_s), on_loop=on_loop)
    _report(result, csv, html, json.dumps(result.summary()) if as_json else None)


def _clients(arrivals: str, rate: list[str] | None) -> int:
    """Return the number of requests in flight per model in a closed loop; 0: the load is an open loop."""
    from cotenant.workloads.requests.arrivals import parse_arrivals

    process = parse_arrivals(arrivals)
    if process.kind == "closed" and rate:
        raise InputError("a closed loop has no rate; leave --rate out", field="rate")
    return process.clients if process.kind == "closed" else 0


def _search(
    made: Callable[[float, int, float | None], OpenAiTest], clients: int, target: float, tolerance: float,
    probe_s: float,
) -> Found[OpenAiResult]:  # fmt: skip
    """Search for the largest factor on the load at which all models meet their SLOs. In a closed loop, only factors
    that give a whole number of clients are tried.
    """
    from cotenant.loadgen.openai import run_openai
    from cotenant.loadgen.search import find_max

    def note(done: Probe[OpenAiResult]) -> None:
        word = "held" if done.held else "missed"
        load = f"{round(clients * done.factor):,} in flight" if clients else f"x{done.factor:<6.3g}"
        print(f"{load} {done.rps:8.2f}/s answered  {word} ({done.attainment:.2%} in time)", file=sys.stderr, flush=True)

    return find_max(
        lambda factor, number: run_openai(made(factor, number, probe_s)), target, tolerance,
        lambda factor, number: run_openai(made(factor, number, None)), note, 1.0 / clients if clients else 0.0,
    )  # fmt: skip


def _report_search(
    found: Found[OpenAiResult], clients: int, asked_rps: float, csv: str | None, html: str | None, as_json: bool
) -> None:
    best = found.final
    if best is None:
        raise WorkError(f"no load down to x{found.probes[-1].factor:.3g} of the given one met the SLOs")
    in_flight = round(clients * found.factor) if clients else None
    rate_rps = None if clients else asked_rps * found.factor
    content = {
        "factor": found.factor, "open_ended": found.open_ended, "confirmed": found.confirmed,
        "in_flight": in_flight, "rate_rps": rate_rps,
        "probes": [
            {"factor": p.factor, "held": p.held, "attainment": p.attainment, "rps": p.rps} for p in found.probes
        ],
        "run": best.summary(),
    }  # fmt: skip
    if not as_json:
        load = f"{in_flight:,} requests of each model in flight" if clients else f"{rate_rps:.3g} requests/s"
        more = "; no probe failed, so a larger load may be possible" if found.open_ended else ""
        print(f"largest load that met the SLOs: {load} (x{found.factor:.3g} of the given one){more}")
    _report(best, csv, html, json.dumps(content) if as_json else None)


def _fields(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(f"{text!r} is not a JSON object", field="extra")
    return found


def _targets(given: list[str] | None, field: str, names: list[str]) -> dict[str, float]:
    """Parse SLOs NAME=MS, or MS for all names."""
    found: dict[str, float] = {}
    for text in given or []:
        name, _, number = text.rpartition("=")
        value = number_or_nan(number)
        if not 0 < value < 1e9 or (name and name not in names):
            raise InputError(f"{text!r} is not MS, or NAME=MS with a name of {', '.join(names)}", field=field)
        found[name] = value
    return found


@contextmanager
def _interruptible() -> Iterator[Callable[[Loop], None]]:
    """Yield a function that lets the first interrupt (Ctrl-C) end a loop's sending. The next one ends the command."""
    before = signal.getsignal(signal.SIGINT)

    def on_loop(loop: Loop) -> None:
        def stop(*_: object) -> None:
            signal.signal(signal.SIGINT, before)
            loop.stop()
            text = "interrupted: waiting for the answers to the requests that were sent; Ctrl-C again to give up"
            print(text, file=sys.stderr, flush=True)

        signal.signal(signal.SIGINT, stop)

    try:
        yield on_loop
    finally:
        signal.signal(signal.SIGINT, before)


def _lines(span_s: float) -> Any:
    """Return a function that prints a line of progress per minute on standard error."""
    last = 0.0

    def tell(loop: Loop) -> None:
        nonlocal last
        now = loop.now()
        if now - last >= 60:
            last = now
            print(f"sending: {now:.0f} of {span_s:.0f} s, {loop.done:,} answers", file=sys.stderr, flush=True)

    return tell


def _report(result: OpenAiResult, csv: str | None, html: str | None, as_json: str | None) -> None:
    from cotenant.cli.llm_view import show
    from cotenant.core.units import counted
    from cotenant.loadgen.openai import grouped

    if csv is not None:
        write_text(csv, result.times.csv(result.test.trace.models, result.ends))
    if html is not None:
        from cotenant.report.llm import write_page

        write_page(html, result)
    if as_json is not None:
        print(as_json)
    else:
        content = result.summary()
        late = content["lateness_ms"]
        left = "" if late["p50"] is None else f", sent {late['p50']:.2f} ms late (p99 {late['p99']:.2f})"
        show(content, f"{len(result.outcome):,} requests in {result.duration_s:.1f} s, seed {result.test.seed}{left}")
    if result.uncounted:
        text = "came without a number of tokens, so events were counted, which may have several tokens each"
        print(f"note: {counted(result.uncounted, 'answer')} {text}", file=sys.stderr)
    for reason, count in list(grouped(result.reasons).items())[:10]:
        print(f"note: {count:,} requests: {reason}", file=sys.stderr)
    if result.fault is not None:
        raise WorkError(result.fault)
