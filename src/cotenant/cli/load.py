"""`cotenant load`: send requests to a running server, open or closed loop, and report latencies."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.shared_options import SEARCH, Tolerance, shown_token
from cotenant.core.errors import InputError, WorkError
from cotenant.core.files import check_writable, write_text

if TYPE_CHECKING:
    from cotenant.loadgen.result import LoadResult
    from cotenant.loadgen.run import LoadTest
    from cotenant.loadgen.search import Found

app = typer.Typer(add_completion=False)
FILES, WIRE = "Files", "Requests"


@app.command()
def load(
    url: Annotated[
        str | None,
        typer.Option(
            help="http://HOST:PORT, https://..., grpc://HOST:PORT, grpcs://... Required, or --openai URL for language "
            "models, which has other options: `cotenant load --openai URL --help`."
        ),
    ] = None,
    service: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=RATE (requests/s), NAME=R1,R2,... (one rate per --step), or NAME=RATE@ARRIVALS. Repeatable."
        ),
    ] = None,
    services: Annotated[
        str | None, typer.Option(help="Services file: supplies names, rates, SLOs and arrivals that no option gives.")
    ] = None,
    arrivals: Annotated[
        str,
        typer.Option(
            help="poisson, constant, closed[:N] (clients), bursts, gamma:CV, mmpp:R1,D1;R2,D2 (rate factor and seconds "
            "of each state), trace:[FORMAT:]FILE."
        ),
    ] = "poisson",
    duration: Annotated[str, typer.Option(help="Duration of the load.")] = "30s",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the requests.")] = 0,
    slo: Annotated[
        list[str] | None,
        typer.Option(help="SLO in ms, or NAME=MS (default: the SLO that the server reports). Repeatable."),
    ] = None,
    rate: Annotated[str, typer.Option(help="Factor on all rates: x1.5.")] = "x1",
    step: Annotated[str, typer.Option(help="Duration of each rate of NAME=R1,R2,...")] = "20s",
    as_recorded: Annotated[bool, typer.Option("--as-recorded", help="Keep the trace's own rate.")] = False,
    find_max: Annotated[
        bool,
        typer.Option(
            "--find-max",
            help="Search for the largest factor on the rates at which SLOs are met.",
            rich_help_panel=SEARCH,
        ),
    ] = False,
    target: Annotated[
        str, typer.Option(help="SLO attainment that every service must reach.", rich_help_panel=SEARCH)
    ] = "99%",
    probe: Annotated[str, typer.Option(help="Duration of one probe of the search.", rich_help_panel=SEARCH)] = "10s",
    tolerance: Tolerance = "5%",
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Items per request.", rich_help_panel=WIRE)] = 1,
    shape: Annotated[
        list[str] | None, typer.Option(help="INPUT=3x224x224, for models that accept any size.", rich_help_panel=WIRE)
    ] = None,
    form: Annotated[str, typer.Option("--format", help="HTTP body: binary or json.", rich_help_panel=WIRE)] = "binary",
    deadline: Annotated[
        bool, typer.Option("--deadline", help="Send each request's SLO to the server.", rich_help_panel=WIRE)
    ] = False,
    check: Annotated[
        bool, typer.Option(help="Check that each answer belongs to its request.", rich_help_panel=WIRE)
    ] = True,
    timeout: Annotated[
        str, typer.Option(help="Requests without an answer after this time count as failed.", rich_help_panel=WIRE)
    ] = "30s",
    connections: Annotated[
        int, typer.Option(min=1, max=60000, help="Largest number of HTTP connections.", rich_help_panel=WIRE)
    ] = 1024,
    senders: Annotated[int, typer.Option(min=1, max=64, help="Sending processes.", rich_help_panel=WIRE)] = 1,
    token: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the bearer token to send.", rich_help_panel=WIRE)
    ] = None,
    cafile: Annotated[str | None, typer.Option(help="CA certificates to trust.", rich_help_panel=WIRE)] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Accept any TLS certificate.", rich_help_panel=WIRE)
    ] = False,
    csv: Annotated[
        str | None, typer.Option(help="Write one row per request, as seen by the client.", rich_help_panel=FILES)
    ] = None,
    html: Annotated[str | None, typer.Option(help="Write a self-contained HTML report.", rich_help_panel=FILES)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Send requests to a server of the Open Inference Protocol and report, per service, the same figures as the
    simulator. Requests are sent when they are due, without waiting for answers, and latency counts from that time; how
    late they were sent is reported.
    """
    from cotenant.core.units import parse_fraction, parse_seconds
    from cotenant.loadgen.options import parse_factor, parse_shapes, read_load_services
    from cotenant.loadgen.run import LoadTest
    from cotenant.loadgen.target import parse_target

    if url is None:
        raise InputError("give --url URL (services) or --openai URL (language models)", field="url")
    if form not in ("binary", "json"):
        raise InputError(f"must be binary or json, not {form!r}", field="format")
    check_writable(csv, html)
    where = parse_target(url, shown_token(token), cafile, insecure)
    test = LoadTest(
        where, read_load_services(service or [], services, arrivals, slo or [], where),
        parse_seconds(duration, field="duration"), seed, parse_seconds(step, field="step"), as_recorded,
        parse_seconds(timeout, field="timeout"), connections, batch, form == "binary", check, deadline, senders,
        parse_shapes(shape or []),
    ).scaled(parse_factor(rate))  # fmt: skip
    if find_max:
        found = _search(
            test, parse_fraction(target, "target"), parse_fraction(tolerance, "tolerance"),
            parse_seconds(probe, field="probe"), as_json,
        )  # fmt: skip
        _report_search(found, test, csv, html, as_json)
        return
    result = _run(test, "sending", quiet=as_json)
    _report(result, csv, html, json.dumps(result.summary()) if as_json else None)


def _run(test: LoadTest, what: str, quiet: bool = False) -> LoadResult:
    from cotenant.cli.load_view import live_table
    from cotenant.loadgen.run import run_load

    with live_table([s.name for s in test.services], test.duration_s, what, quiet) as tell:
        return run_load(test, tell)


def _report(result: LoadResult, csv: str | None, html: str | None, as_json: str | None) -> None:
    from cotenant.cli.load_view import show

    if csv is not None:
        write_text(csv, result.csv())
    if html is not None:
        from cotenant.report.load import write_page

        write_page(html, result)
    if as_json is not None:
        print(as_json)
    else:
        show(result)
    for warning in result.warnings():
        print(f"note: {warning}", file=sys.stderr)
    if result.fault is not None:
        raise WorkError(result.fault)


def _search(test: LoadTest, target: float, tolerance: float, probe_s: float, quiet: bool) -> Found[LoadResult]:
    from cotenant.loadgen.search import Probe, find_max

    if all(s.slo_ms is None for s in test.services):
        raise InputError("no service has an SLO to meet; give --slo", field="slo")
    if all(not s.rates_rps for s in test.services):
        raise InputError("a closed loop has no rate to search for", field="service")

    def run(factor: float, number: int) -> LoadResult:
        return _run(test.scaled(factor, probe_s, test.seed + number), f"probe at x{factor:.3g}", quiet)

    def confirm(factor: float, number: int) -> LoadResult:
        return _run(test.scaled(factor, None, test.seed + number), f"repeated at x{factor:.3g}", quiet)

    def note(done: Probe[LoadResult]) -> None:
        word = "held" if done.held else "missed"
        print(f"x{done.factor:<6.3g} {done.rps:8.0f} rps  {word} ({done.attainment:.2%} in time)", file=sys.stderr)

    return find_max(run, target, tolerance, confirm, note)


def _report_search(found: Found[LoadResult], test: LoadTest, csv: str | None, html: str | None, as_json: bool) -> None:
    best = found.final or next((p.result for p in reversed(found.probes) if p.factor == found.factor), None)
    if best is None:
        raise WorkError(f"the SLOs were missed at every load down to x{found.probes[-1].factor:.3g} of the given rates")
    if not as_json:
        rates = ", ".join(f"{s.name} {s.mean_rps * found.factor:.1f}/s" for s in test.services if s.mean_rps)
        more = "; no probe failed, so a larger load may be possible" if found.open_ended else ""
        print(f"largest load that met the SLOs: x{found.factor:.3g} of the given rates ({rates}){more}")
        _report(best, csv, html, None)
        return
    content: dict[str, Any] = {
        "factor": found.factor,
        "open_ended": found.open_ended,
        "confirmed": found.confirmed,
        "rates_rps": {s.name: None if s.mean_rps is None else s.mean_rps * found.factor for s in test.services},
        "probes": [
            {"factor": p.factor, "held": p.held, "slo_attainment": p.attainment, "rps": p.rps} for p in found.probes
        ],
        "run": best.summary(),
    }
    _report(best, csv, html, json.dumps(content))
