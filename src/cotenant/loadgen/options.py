"""Parsing of a load test's command-line options: services, arrivals, SLOs and shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cotenant.core.errors import InputError
from cotenant.core.serving import Application, Service
from cotenant.core.units import number_or_nan
from cotenant.loadgen.payload import ask_slos
from cotenant.loadgen.schedule import LoadService, parse_service
from cotenant.loadgen.target import Target
from cotenant.workloads.requests.arrivals import Arrivals, parse_arrivals
from cotenant.workloads.requests.readers import FORMATS


def parse_load_arrivals(text: str) -> Arrivals:
    """Parse an arrival process: one of the forms that parse_arrivals knows, or one of two more for live load. `closed`:
    each client sends its next request when the previous one is answered; a service given as NAME=N has N clients, and
    one given without a number has one. `trace:FILE`: the format of the file is detected.
    """
    if text == "closed":
        return Arrivals("closed")
    kind, _, rest = text.partition(":")
    if kind == "trace" and rest and rest.partition(":")[0] not in FORMATS:
        return Arrivals("trace", format=recognise(rest), path=rest)
    return parse_arrivals(text)


def recognise(path: str) -> str:
    """Detect the format of a request file from its name and first line."""
    name = Path(path).name.lower()
    if ".tar" in name or name.endswith((".tgz", ".txz")):
        return "servegen"
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            first = next((line.strip() for line in file if line.strip()), "")
    except OSError as error:
        raise InputError(f"cannot read: {error.strerror}", file=path) from None
    if name.endswith(".jsonl") or '"timestamp"' in first:
        return "mooncake"
    if first.startswith("{"):
        return "disb"
    if "TIMESTAMP" in first:
        return "azure-llm"
    cells = first.replace(",", " ").split()
    if cells and all(c.isdigit() for c in cells):
        return "offsets-ms"
    if first.count(",") >= 2:
        return "servegen"
    known = ", ".join(f"trace:{f}:FILE" for f in FORMATS)
    raise InputError(f"the format is not recognised; write one of {known}", file=path, field="arrivals")


def read_load_services(
    texts: Sequence[str], file: str | None, arrivals: str, slos: Sequence[str], target: Target
) -> tuple[LoadService, ...]:
    """Return the services under load. SLOs come from --slo, else from the file, else from the server."""
    process = parse_load_arrivals(arrivals)
    found = [_closed(_parsed(text, process)) for text in texts]
    given: dict[str, float] = {}
    if file is not None:
        own, given = _from_file(file, process, {s.name for s in found})
        found += own
    if not found:
        raise InputError("nothing to send: give --service NAME=RATE or --services FILE", field="service")
    names = [s.name for s in found]
    twice = next((n for i, n in enumerate(names) if n in names[:i]), None)
    if twice is not None:
        raise InputError(f"{twice} is given twice", field="service")
    told = ask_slos(target)
    asked = _slos(slos, names)
    return tuple(replace(s, slo_ms=asked.get(s.name, given.get(s.name, told.get(s.name)))) for s in found)


def _parsed(text: str, process: Arrivals) -> LoadService:
    """Parse a service, which may have an arrival process of its own: `cats=100@gamma:2`."""
    name, equals, rest = text.partition("=")
    head, at, own = rest.partition("@") if equals else name.partition("@")
    if not at:
        return parse_service(text, process)
    return parse_service(f"{name}={head}" if equals else head, parse_load_arrivals(own))


def _closed(service: LoadService) -> LoadService:
    """Return the service with its number of closed-loop clients: that of `closed:N`, else the number that stands in
    place of the service's rate, else 1.
    """
    if service.arrivals.kind != "closed":
        return service
    if service.arrivals.clients:
        return replace(service, rates_rps=())
    number = service.rates_rps[0] if service.rates_rps else 1.0
    if number != int(number) or not 1 <= number <= 100_000 or len(service.rates_rps) > 1:
        raise InputError(f"{service.name}: closed-loop clients must be 1 to 100,000, not {number:g}", field="service")
    return replace(service, rates_rps=(), arrivals=Arrivals("closed", clients=int(number)))


def _from_file(file: str, process: Arrivals, taken: set[str]) -> tuple[list[LoadService], dict[str, float]]:
    from cotenant.serving.config.services import read_services

    deployment = read_services(file)
    made, slos = [], {}
    known: list[Service | Application] = [*deployment.services, *deployment.applications]
    for x in known:
        slos[x.name] = x.slo_ms
        if x.name not in taken:
            own = deployment.arrivals.get(x.name)
            made.append(_closed(LoadService(x.name, (x.rate_rps,), parse_load_arrivals(own) if own else process)))
    return made, slos


def _slos(texts: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for text in texts:
        name, equals, rest = text.rpartition("=")
        value = number_or_nan(rest.removesuffix("ms"))
        if not math.isfinite(value) or value <= 0:
            raise InputError(f"{text!r} is not an SLO; write 50 or NAME=50, in milliseconds", field="slo")
        if equals and name not in names:
            raise InputError(f"{name!r} is none of the services of this run: {', '.join(names)}", field="slo")
        found |= {name: value} if equals else {n: value for n in names if n not in found}
    return found


def parse_factor(text: str) -> float:
    """Parse a factor on rates: x1.5 or 1.5."""
    value = number_or_nan(text.removeprefix("x"))
    if not math.isfinite(value) or not 1e-6 <= value <= 1e6:
        raise InputError(f"{text!r} is not a factor; write x1.5", field="rate")
    return value


def parse_shapes(texts: Sequence[str]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Parse texts such as INPUT=3x224x224, the shape of a model's input, into (name, sizes)."""
    found = []
    for text in texts:
        name, _, rest = text.partition("=")
        sizes = rest.split("x")
        if not name or not all(s.isdigit() and 0 < int(s) <= 1 << 31 for s in sizes):
            raise InputError(f"{text!r} is not a shape; write INPUT=3x224x224", field="shape")
        found.append((name, tuple(int(s) for s in sizes)))
    return tuple(found)
