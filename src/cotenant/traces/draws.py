"""Arrivals, durations and GPU counts as random draws, parsed from the way users write them.

Every drawn part has its own stream of the seed, so that drawing one part anew leaves the others as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NoReturn

import numpy as np

from cotenant.model.errors import InputError
from cotenant.model.units import parse_seconds
from cotenant.model.work import Floats
from cotenant.traces.table import MAX_SECONDS

STREAMS = ("arrivals", "durations", "gpus", "models", "tenants")
MAX_CV = 1000.0
LEAST_RATE_PER_S = 1e-11  # one arrival within the longest time that a trace may hold
Sample = Callable[[np.random.Generator, int], Floats]  # (rng, n) -> n values
Arrivals = Callable[[np.random.Generator, int, float], Floats]  # (rng, n, rate per second) -> n sorted times


def stream(seed: int, part: str) -> np.random.Generator:
    """The random stream of one part of a trace."""
    if not 0 <= seed < 2**63:
        raise InputError(f"{seed} is not a seed; a seed is a whole number from 0 below 2^63", field="seed")
    return np.random.default_rng([seed, STREAMS.index(part)])


def round_ms(seconds: Floats, field: str) -> Floats:
    """To whole milliseconds: short numbers in files, and far below what scheduling can tell apart. InputError about
    `field` where a time is beyond what a trace may hold."""
    if len(seconds) and not seconds.max() <= MAX_SECONDS:
        raise InputError(f"gives times beyond {MAX_SECONDS:g} s, the most that makes sense here", field=field)
    rounded: Floats = np.round(seconds, 3)
    return rounded


def check_rate(rate_per_s: float) -> None:
    """InputError for a rate of arrivals that no trace has."""
    if not LEAST_RATE_PER_S <= rate_per_s < 1e9:
        raise InputError("the rate must be above 0, such as 8/h, and within reason", field="rate")


# -- durations


def parse_durations(text: str, empirical: Callable[[str], Floats]) -> Sample:
    """two-part | two-part-short | lognormal:MEDIAN:SIGMA | trace:F, `empirical` giving the durations of F.

    two-part: 80 % 60 * 10^U(1.5, 3) s, the rest 60 * 10^U(3, 4) s; two-part-short: 60 * 10^U(1.5, 2.5) s and
    60 * 10^U(2.5, 2.7) s. Both are the public Synergy simulator's. A trace's durations are drawn with replacement.
    """
    kind, _, rest = text.partition(":")
    if text == "two-part":
        return lambda rng, n: _two_part(rng, n, (1.5, 3.0), (3.0, 4.0))
    if text == "two-part-short":
        return lambda rng, n: _two_part(rng, n, (1.5, 2.5), (2.5, 2.7))
    if kind == "lognormal":
        median_s, sigma = _lognormal(text, rest)
        return lambda rng, n: np.maximum(median_s * np.exp(sigma * rng.standard_normal(n)), 0.001)
    if kind == "trace" and rest:
        values = empirical(rest)
        return lambda rng, n: values[rng.integers(0, len(values), n)]
    raise InputError(
        f"unknown durations {text!r}; write two-part, two-part-short, lognormal:MEDIAN:SIGMA (such as "
        "lognormal:20min:1.5) or trace:FORMAT:PATH",
        field="durations",
    )


def _lognormal(text: str, rest: str) -> tuple[float, float]:
    median, colon, sigma_text = rest.partition(":")
    try:
        sigma = float(sigma_text)
    except ValueError:
        sigma = math.nan
    median_s = parse_seconds(median, field="durations") if colon and median else math.nan
    if not (median_s > 0 and 0 <= sigma <= 10):
        raise InputError(
            f"{text!r} is not lognormal:MEDIAN:SIGMA with a median above 0 and a sigma of 0 to 10, "
            "such as lognormal:20min:1.5",
            field="durations",
        )
    return median_s, sigma


def _two_part(rng: np.random.Generator, n: int, common: tuple[float, float], rare: tuple[float, float]) -> Floats:
    is_common = rng.random(n) < 0.8
    u = rng.random(n)
    exponent = np.where(is_common, common[0] + u * (common[1] - common[0]), rare[0] + u * (rare[1] - rare[0]))
    seconds: Floats = 60.0 * 10.0**exponent
    return seconds


# -- arrivals


def parse_arrivals(text: str, empirical: Callable[[str], Floats]) -> Arrivals:
    """poisson | static | bursty:CV | trace:F -> a function (rng, n, rate per second) -> sorted arrival times.

    poisson: exponential gaps; bursty: Gamma gaps whose standard deviation is CV times their mean; trace: the arrivals
    that `empirical` gives for F, scaled to the rate (as they are where it is NaN), and repeated where F is shorter.
    The first job of poisson and bursty arrives after one gap.
    """
    kind, _, rest = text.partition(":")
    if text == "poisson":
        return lambda rng, n, rate: np.cumsum(rng.exponential(1.0 / rate, n))
    if text == "poisson-seconds":  # gaps in whole seconds, rounded up, as the public Synergy simulator draws them
        return lambda rng, n, rate: np.cumsum(np.ceil(rng.exponential(1.0 / rate, n)))
    if text == "poisson-gap":  # the gap itself is Poisson: nearly constant; twice as fast for the first third (MISO)
        return _poisson_gap
    if text == "static":
        return lambda rng, n, rate: np.zeros(n)
    if kind == "bursty":
        shape = 1.0 / _cv(text, rest) ** 2
        return lambda rng, n, rate: np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), n))
    if kind == "trace" and rest:
        times = empirical(rest)
        return lambda rng, n, rate: _repeated(times - times[0], n, rate)
    raise InputError(
        f"unknown arrivals {text!r}; write poisson, static, bursty:CV (such as bursty:4) or trace:FORMAT:PATH",
        field="arrivals",
    )


def is_random(arrivals: str) -> bool:
    """Whether these arrivals depend on a seed."""
    return arrivals != "static" and not arrivals.startswith("trace:")


def _cv(text: str, rest: str) -> float:
    try:
        cv = float(rest)
    except ValueError:
        cv = math.nan
    if not 0.01 <= cv <= MAX_CV:
        raise InputError(f"{text!r} is not bursty:CV, CV being 0.01 to {MAX_CV:g}, such as bursty:4", field="arrivals")
    return cv


def _poisson_gap(rng: np.random.Generator, n: int, rate: float) -> Floats:
    mean = np.where(np.arange(n) < n // 3, 0.5 / rate, 1.0 / rate)
    return np.cumsum(rng.poisson(mean).astype(np.float64))


def _repeated(times: Floats, n: int, rate: float) -> Floats:
    if len(times) < n:
        # a repetition starts one mean gap after the end of the one before
        gap = times[-1] / max(len(times) - 1, 1)
        rounds = -(-n // len(times))
        times = np.concatenate([times + k * (times[-1] + gap) for k in range(rounds)])
    times = times[:n]
    if not math.isnan(rate):
        if n > 1 and times[-1] == 0:
            raise InputError("the arrivals to scale are all at the same time; leave the rate out", field="rate")
        own = (n - 1) / times[-1] if n > 1 else rate
        times = times * (own / rate)
    return times


# -- GPU counts


def parse_gpu_mix(text: str) -> tuple[Floats, Floats]:
    """(GPU counts, probabilities) from 1:70,2:10,4:15,8:5; counts may be parts of one GPU (0.5:20). Weights need not
    add up to anything."""
    counts, weights = [], []
    for part in text.split(","):
        count_text, colon, weight_text = part.partition(":")
        try:
            count, weight = float(count_text), float(weight_text.strip().removesuffix("%"))
        except ValueError:
            _bad_mix(text, part)
        valid = 0.001 <= count <= 100_000 and (count < 1 or count == int(count)) and 0 <= weight < math.inf
        if not colon or not valid or count in counts:
            _bad_mix(text, part)
        counts.append(count)
        weights.append(weight)
    total = sum(weights)
    if total <= 0:
        raise InputError(f"the weights in {text!r} are all 0", field="gpu-mix")
    return np.array(counts), np.array(weights) / total


def _bad_mix(text: str, part: str) -> NoReturn:
    raise InputError(
        f"{part.strip()!r} in {text!r} is not GPUS:WEIGHT with a new GPU count; write it like 1:70,2:10,4:15,8:5",
        field="gpu-mix",
    )


def draw_choice(rng: np.random.Generator, n: int, values: Floats, probabilities: Floats) -> Floats:
    """n values drawn with these probabilities."""
    edges = np.cumsum(probabilities)
    chosen: Floats = values[np.minimum(np.searchsorted(edges, rng.random(n), side="right"), len(values) - 1)]
    return chosen
