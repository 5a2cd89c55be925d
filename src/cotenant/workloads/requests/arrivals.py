"""Arrival processes of requests: sorted arrival times in seconds from the start of a run.

poisson              exponential gaps
constant             equal gaps
gamma:CV             gamma gaps with this coefficient of variation (1: Poisson, above: bursts)
mmpp:R1,D1;R2,D2...  Markov-modulated Poisson process: the states have rate factor R and a mean stay of D seconds
                     (exponential); factors are scaled so that the mean rate is the given one
closed:N             N clients, each of which sends its next request when it has a response (not drawn here)
trace:FORMAT:FILE    recorded requests (see readers.py), scaled to the rate if one is given
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cotenant.core.errors import InputError
from cotenant.core.units import number_or_nan

KINDS = ("poisson", "constant", "gamma", "mmpp", "closed", "trace")
# the process `bursts`: on average five seconds at the base rate, and then one second at six times that rate
BURSTS = "mmpp:1,5;6,1"
MAX_REQUESTS = 50_000_000
MAX_CV = 100.0
MAX_STAYS = 1_000_000


@dataclass(frozen=True)
class Arrivals:
    """A parsed arrival process of requests: `kind` and its parameters."""

    kind: str
    cv: float = 1.0
    states: tuple[tuple[float, float], ...] = ()  # the states of mmpp: rate factor and mean duration in s of each
    clients: int = 0
    format: str = ""
    path: str = ""

    def __str__(self) -> str:
        if self.kind == "gamma":
            return f"gamma:{self.cv:g}"
        if self.kind == "mmpp":
            return "mmpp:" + ";".join(f"{r:g},{d:g}" for r, d in self.states)
        if self.kind == "closed":
            return f"closed:{self.clients}"
        return f"trace:{self.format}:{self.path}" if self.kind == "trace" else self.kind


def _positive(text: str, what: str) -> float:
    value = number_or_nan(text)
    if not math.isfinite(value) or value <= 0:
        raise InputError(f"{what} {text!r} is not a positive number", field="arrivals")
    return value


def parse_arrivals(text: str) -> Arrivals:
    """Parse the text of an option into an arrival process of requests."""
    kind, _, rest = (BURSTS if text == "bursts" else text).partition(":")
    if kind in ("poisson", "constant") and not rest:
        return Arrivals(kind)
    if kind == "gamma" and rest:
        cv = _positive(rest, "coefficient of variation")
        if cv > MAX_CV:
            raise InputError(f"a coefficient of variation of {cv:g} is over {MAX_CV:g}", field="arrivals")
        return Arrivals(kind, cv=cv)
    if kind == "mmpp" and rest:
        states = []
        for part in rest.split(";"):
            rate, comma, stay = part.partition(",")
            if not comma:
                raise InputError(f"mmpp state {part!r} is not RATE_FACTOR,MEAN_SECONDS", field="arrivals")
            factor = 0.0 if rate.strip() in ("0", "0.0") else _positive(rate, "rate factor")
            states.append((factor, _positive(stay, "mean stay")))
        if len(states) < 2 or not any(r > 0 for r, _ in states):
            raise InputError("mmpp needs two states or more, one with a rate above 0", field="arrivals")
        return Arrivals(kind, states=tuple(states))
    if kind == "closed" and rest.isdigit() and 1 <= int(rest) <= 100_000:
        return Arrivals(kind, clients=int(rest))
    if kind == "trace":
        form, _, path = rest.partition(":")
        if form and path:
            return Arrivals(kind, format=form, path=path)
    raise InputError(
        f"{text!r} is not an arrival process; write poisson, constant, bursts, gamma:CV (coefficient of variation), "
        "mmpp:R1,D1;R2,D2 (factor on the rate and mean seconds of each state), closed:N (clients) or trace:FORMAT:FILE",
        field="arrivals",
    )


def draw(process: Arrivals, rate_rps: float, duration_s: float, rng: np.random.Generator) -> np.ndarray:
    """Draw ascending arrival times (n,) in [0, duration_s), of a process that is neither closed nor a trace."""
    if not math.isfinite(rate_rps) or rate_rps <= 0:
        raise InputError(f"a rate of {rate_rps:g} requests/s is not positive", field="rate_rps")
    if not math.isfinite(duration_s) or duration_s <= 0:
        raise InputError(f"duration must be above 0 s, not {duration_s:g} s", field="duration")
    if rate_rps * duration_s > MAX_REQUESTS:
        raise InputError(
            f"{rate_rps * duration_s:.3g} requests are more than the maximum of {MAX_REQUESTS:,}", field="duration"
        )
    if process.kind == "constant":
        return np.arange(math.ceil(rate_rps * duration_s)) / rate_rps
    if process.kind == "poisson":
        return np.sort(rng.random(rng.poisson(rate_rps * duration_s)) * duration_s)
    if process.kind == "gamma":
        shape = 1.0 / process.cv**2
        return _renewal(lambda n: rng.gamma(shape, 1.0 / (shape * rate_rps), n), rate_rps, duration_s)
    if process.kind == "mmpp":
        return _mmpp(process, rate_rps, duration_s, rng)
    raise InputError(f"arrivals {process} have no rate from which requests can be drawn", field="arrivals")


def _renewal(gaps: Callable[[int], np.ndarray], rate_rps: float, duration_s: float) -> np.ndarray:
    parts, last = [], 0.0
    while last < duration_s:
        times = last + np.cumsum(gaps(int(rate_rps * (duration_s - last) * 1.1) + 16))
        parts.append(times)
        last = float(times[-1])
    times = np.concatenate(parts)
    return times[times < duration_s]


def _mmpp(process: Arrivals, rate_rps: float, duration_s: float, rng: np.random.Generator) -> np.ndarray:
    """Draw a Markov-modulated Poisson process. It visits the states in cyclic order."""
    factors = np.array([r for r, _ in process.states])
    stays = np.array([d for _, d in process.states])
    factors = factors * stays.sum() / (factors * stays).sum()
    if duration_s > MAX_STAYS * stays.mean():
        raise InputError(
            f"mmpp would change its state over {MAX_STAYS:,} times: give longer mean durations of states",
            field="arrivals",
        )
    out, now, state = [], 0.0, int(rng.integers(len(stays)))
    while now < duration_s:
        end = min(duration_s, now + rng.exponential(stays[state]))
        count = rng.poisson(rate_rps * factors[state] * (end - now))
        out.append(np.sort(now + rng.random(count) * (end - now)))
        now, state = end, (state + 1) % len(stays)
    return np.concatenate(out)


def fit_to(
    times_s: np.ndarray,
    rate_rps: float | None,
    duration_s: float,
    span_s: float | None = None,
    total: float | None = None,
) -> np.ndarray:
    """Fit recorded times to `duration_s`: scale them to the mean rate (None: as recorded), and repeat them if they are
    too short. `span_s`: length of the recording if the format defines it. `total`: number of requests of the whole
    recording if `times_s` has only its beginning."""
    if not math.isfinite(duration_s) or duration_s <= 0:
        raise InputError(f"duration must be above 0 s, not {duration_s:g} s", field="duration")
    if len(times_s) == 0 and total is None:
        raise InputError("the trace has no requests", field="arrivals")
    if span_s is not None:
        times, span = np.sort(times_s), span_s
    else:
        times = np.sort(times_s) - times_s.min()
        # a mean gap is added after the last request, as the recording does not state when it ended
        span = float(times[-1]) * len(times) / max(1, len(times) - 1)
    if span <= 0:
        raise InputError("all requests of the trace arrive at the same time", field="arrivals")
    if rate_rps is not None:
        scale = (total or len(times)) / (rate_rps * span)
        times, span = times * scale, span * scale
    rounds = math.ceil(duration_s / span)
    if rounds * len(times) > MAX_REQUESTS:
        raise InputError(
            f"{rounds * len(times):,} requests are more than the maximum of {MAX_REQUESTS:,}", field="duration"
        )
    times = (times[None, :] + (np.arange(rounds) * span)[:, None]).ravel()
    kept: np.ndarray = times[times < duration_s]
    return kept
