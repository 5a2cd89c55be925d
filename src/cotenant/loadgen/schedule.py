"""Schedules of load tests: services with their arrivals become one sorted list of requests. Nothing is sent here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cotenant.core.errors import InputError
from cotenant.core.units import number_or_nan
from cotenant.workloads.requests.arrivals import MAX_REQUESTS, Arrivals, draw, fit_to
from cotenant.workloads.requests.readers import disb_client, read_requests

MAX_CLIENTS = 100_000


@dataclass(frozen=True)
class LoadService:
    """One service under load. `rates_rps`: one rate, or several that follow each other in steps, and then begin again
    with the first (the test states the length of a step); empty for closed loops and traces as recorded. `slo_ms` None:
    no answer is late."""

    name: str
    rates_rps: tuple[float, ...]
    arrivals: Arrivals
    slo_ms: float | None = None

    def scaled(self, factor: float) -> LoadService:
        """Return a copy of the service with its rates multiplied by `factor`."""
        return replace(self, rates_rps=tuple(r * factor for r in self.rates_rps))

    @property
    def mean_rps(self) -> float | None:
        """Return the mean rate over the steps; None if the service has no rates."""
        return sum(self.rates_rps) / len(self.rates_rps) if self.rates_rps else None


@dataclass(frozen=True)
class Schedule:
    """The requests of a load test. `times_s` (n,): due times, ascending; `svc` (n,): index of each request's service;
    `clients`: service of each closed-loop client.
    """

    times_s: np.ndarray
    svc: np.ndarray
    clients: tuple[int, ...]
    remarks: tuple[str, ...] = ()

    def part(self, sender: int, senders: int) -> Schedule:
        """Return every `senders`-th request, beginning with number `sender`, so that several processes divide a
        schedule.
        """
        return Schedule(self.times_s[sender::senders], self.svc[sender::senders], self.clients[sender::senders])


def build_schedule(
    services: Sequence[LoadService], duration_s: float, seed: int, step_s: float = 20.0, as_recorded: bool = False
) -> Schedule:
    """Draw the requests of a load test of `duration_s` seconds. Each service has its own random stream, so that its
    requests do not change when other services are added or removed.
    """
    if not math.isfinite(duration_s) or duration_s <= 0:
        raise InputError(f"duration must be above 0 s, not {duration_s:g} s", field="duration")
    times: list[np.ndarray] = []
    svc: list[np.ndarray] = []
    clients: list[int] = []
    remarks: list[str] = []
    for s, service in enumerate(services):
        process, rates = service.arrivals, service.rates_rps
        if process.kind == "trace" and process.format == "disb":
            client = disb_client(process.path, service.name)
            process = client.arrivals
            if as_recorded or not rates:
                rates = (client.rate_rps,)
        if process.kind == "closed":
            clients += [s] * process.clients
            continue
        if process.kind == "trace":
            rate = None if as_recorded else service.mean_rps
            found = read_requests(process.format, process.path, seed, rate, duration_s)
            own = fit_to(found.times_s, rate, duration_s, found.span_s, found.total)
            remarks += found.remarks
        else:
            own = _drawn(process, service.name, rates, duration_s, np.random.default_rng([seed, s]), step_s)
        times.append(own)
        svc.append(np.full(len(own), s, np.int32))
    total = sum(len(t) for t in times)
    if total > MAX_REQUESTS:
        raise InputError(
            f"{total:,} requests are more than the maximum of {MAX_REQUESTS:,}; make the run shorter", field="duration"
        )
    if len(clients) > MAX_CLIENTS:
        raise InputError(
            f"{len(clients):,} closed-loop clients are more than the maximum of {MAX_CLIENTS:,}", field="arrivals"
        )
    if not total and not clients:
        raise InputError(f"no request falls into {duration_s:g} s at these rates", field="duration")
    at = np.concatenate(times) if times else np.zeros(0)
    which = np.concatenate(svc) if svc else np.zeros(0, np.int32)
    order = np.argsort(at, kind="stable")
    return Schedule(at[order], which[order], tuple(clients), tuple(remarks))


def _drawn(
    process: Arrivals, name: str, rates: Sequence[float], duration_s: float, rng: np.random.Generator, step_s: float
) -> np.ndarray:
    if not rates:
        raise InputError(f"{process} arrivals need a rate: {name}=100", field="service")
    if len(rates) == 1:
        return draw(process, rates[0], duration_s, rng)
    if not math.isfinite(step_s) or step_s <= 0:
        raise InputError(f"step must be above 0 s, not {step_s:g} s", field="step")
    parts, start, n = [], 0.0, 0
    while start < duration_s:
        length, rate = min(step_s, duration_s - start), rates[n % len(rates)]
        if rate > 0:
            parts.append(start + draw(process, rate, length, rng))
        start, n = start + step_s, n + 1
    return np.concatenate(parts) if parts else np.zeros(0)


def parse_service(text: str, arrivals: Arrivals) -> LoadService:
    """Parse a service: `NAME=RATE`, `NAME=R1,R2,...` (steps), or `NAME` (closed loops and traces as recorded)."""
    name, equals, rest = text.partition("=")
    rates = tuple(_rate(x, text) for x in rest.split(",")) if rest else ()
    if not name or (equals and not rates):
        raise InputError(f"{text!r} is not a service and its rate; write NAME=RATE", field="service")
    if not rates and arrivals.kind not in ("closed", "trace"):
        raise InputError(f"{text!r} needs a rate for {arrivals} arrivals; write {name}=100", field="service")
    if rates and not any(rates):
        raise InputError(f"{text!r} sends no request, because all its rates are 0", field="service")
    return LoadService(name, rates, arrivals)


def _rate(text: str, whole: str) -> float:
    value = number_or_nan(text)
    if not math.isfinite(value) or value < 0:
        raise InputError(f"{text!r} in {whole!r} is not a rate in requests per second", field="service")
    return value
