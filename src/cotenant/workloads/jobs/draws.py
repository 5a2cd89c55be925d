"""Random arrivals, durations and GPU counts, parsed from the text of options.

Each of these parts of a trace has its own random stream of the seed, so that changing one leaves the others unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NoReturn

import numpy as np

from cotenant.core.errors import InputError
from cotenant.core.units import number_or_nan, parse_seconds
from cotenant.core.work import Floats, Ints
from cotenant.workloads.table import MAX_SECONDS

STREAMS = ("arrivals", "durations", "gpus", "models", "tenants")
MAX_CV = 1000.0
MAX_RUN = 1_000_000
LEAST_RATE_PER_S = 1e-11  # the lowest rate that is accepted: one arrival within MAX_SECONDS
Sample = Callable[[np.random.Generator, int], Floats]  # a function of a random generator and n that returns n values
# a function of a random generator, n and the rate per second that returns n times in ascending order
Arrivals = Callable[[np.random.Generator, int, float], Floats]


def stream(seed: int, part: str) -> np.random.Generator:
    """Return the random stream of one part of a trace (one of STREAMS). InputError for an invalid seed."""
    if not 0 <= seed < 2**63:
        raise InputError(f"{seed} is not a seed; a seed is a whole number from 0 below 2^63", field="seed")
    return np.random.default_rng([seed, STREAMS.index(part)])


def round_ms(seconds: Floats, field: str) -> Floats:
    """Round times to milliseconds, which keeps files short and does not affect scheduling. InputError about `field` if
    a time is above MAX_SECONDS.
    """
    if len(seconds) and not seconds.max() <= MAX_SECONDS:
        raise InputError(f"gives times above the maximum of {MAX_SECONDS:g} s", field=field)
    rounded: Floats = np.round(seconds, 3)
    return rounded


def check_rate(rate_per_s: float) -> None:
    """Raise InputError unless the arrival rate is at least 1e-11 and below 1e9 per second."""
    if not LEAST_RATE_PER_S <= rate_per_s < 1e9:
        raise InputError("the rate must be at least 1e-11 and below 1e9 jobs per second, such as 8/h", field="rate")


# -- durations


def parse_durations(text: str, empirical: Callable[[str], Floats]) -> Sample:
    """Parse two-part, two-part-short, lognormal:MEDIAN:SIGMA or trace:F into a function that draws n durations.

    two-part: 80 % of the durations are 60 * 10^U(1.5, 3) s, the others 60 * 10^U(3, 4) s. two-part-short: 80 % are 60 *
    10^U(1.5, 2.5) s, the others 60 * 10^U(2.5, 2.7) s. Both are from the public Synergy simulator. trace:F draws from
    the durations of F, which `empirical` reads, with replacement.
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
    sigma = number_or_nan(sigma_text)
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
    """Parse poisson, static, bursty:CV, lognormal:CV, hyperexp:SHARE,MEAN[,RUN];... or trace:F into a function (rng, n,
    rate per second) -> n sorted arrival times in seconds.

    poisson: gaps between arrivals are exponentially distributed.
    static: all jobs arrive at time 0.
    bursty, lognormal: gaps have a Gamma or a lognormal distribution whose standard deviation is CV times the mean.
    hyperexp: each gap is exponentially distributed with one of the given means. The weight SHARE determines the
    fraction of gaps that have the mean MEAN. All means are multiplied by one factor, so that arrivals have the rate.
    Gaps with the same mean come in runs of geometrically distributed length with mean RUN. If RUN is left out, it is 1,
    and the means of successive gaps are independent.
    trace: the arrivals of F, which `empirical` reads, scaled to the rate and repeated if F has fewer than n. They are
    not scaled if the rate is NaN.

    With random gaps the first job arrives after one gap.
    """
    kind, _, rest = text.partition(":")
    if text == "poisson":
        return lambda rng, n, rate: np.cumsum(rng.exponential(1.0 / rate, n))
    # poisson-seconds: as poisson, but gaps are rounded up to whole seconds, as in the public Synergy simulator
    if text == "poisson-seconds":
        return lambda rng, n, rate: np.cumsum(np.ceil(rng.exponential(1.0 / rate, n)))
    # poisson-gap: as in MISO, a gap is a Poisson-distributed number of whole seconds, so gaps vary less than
    # exponential ones; in the first third of the trace their mean is half as long
    if text == "poisson-gap":
        return _poisson_gap
    if text == "static":
        return lambda rng, n, rate: np.zeros(n)
    if kind == "bursty":
        shape = 1.0 / _cv(text, rest) ** 2
        return lambda rng, n, rate: np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), n))
    if kind == "lognormal":
        # of a lognormal distribution, variance / mean^2 is exp(sigma^2) - 1, and the mean is exp(mu + sigma^2 / 2)
        variance = math.log1p(_cv(text, rest) ** 2)
        sigma, mu = math.sqrt(variance), -variance / 2
        return lambda rng, n, rate: np.cumsum(np.exp(mu + sigma * rng.standard_normal(n)) / rate)
    if kind == "hyperexp":
        shares, means, runs = _phases(text, rest)
        return lambda rng, n, rate: np.cumsum(
            means[_phase_of_each(rng, n, shares, runs)] * rng.exponential(1.0 / rate, n)
        )
    if kind == "trace" and rest:
        times = empirical(rest)
        return lambda rng, n, rate: _repeated(times - times[0], n, rate)
    raise InputError(
        f"unknown arrivals {text!r}; write poisson, static, bursty:CV or lognormal:CV (such as bursty:4), "
        "hyperexp:SHARE,MEAN[,RUN];... or trace:FORMAT:PATH",
        field="arrivals",
    )


def is_random(arrivals: str) -> bool:
    """Return whether the arrival process `arrivals` (see parse_arrivals) draws random numbers."""
    return arrivals != "static" and not arrivals.startswith("trace:")


def _cv(text: str, rest: str) -> float:
    cv = number_or_nan(rest)
    if not 0.01 <= cv <= MAX_CV:
        kind = text.partition(":")[0]
        raise InputError(f"{text!r} is not {kind}:CV, CV being 0.01 to {MAX_CV:g}, such as {kind}:4", field="arrivals")
    return cv


def _phases(text: str, rest: str) -> tuple[Floats, Floats, Floats]:
    """Return the phases of hyperexponential gaps between arrivals: shares (sum 1), means (scaled so that the mean gap
    is 1) and mean lengths of runs.
    """
    try:
        phases = np.array([([float(x) for x in part.split(",")] + [1.0])[:3] for part in rest.split(";")])
    except ValueError:
        phases = np.empty(0)
    if (
        phases.ndim != 2
        or phases.shape[1] != 3
        or max(part.count(",") for part in rest.split(";")) > 2
        or not ((phases >= 1e-9) & (phases <= 1e12)).all()
        or not ((phases[:, 2] >= 1) & (phases[:, 2] <= MAX_RUN)).all()
    ):
        raise InputError(
            f"{text!r} is not hyperexp:SHARE,MEAN[,RUN];SHARE,MEAN[,RUN] with numbers from 1e-9 to 1e12 and runs "
            f"from 1 to {MAX_RUN:,}, such as hyperexp:90,10,50;10,400",
            field="arrivals",
        )
    shares, means = phases[:, 0] / phases[:, 0].sum(), phases[:, 1]
    return shares, means / (shares * means).sum(), phases[:, 2]


def _phase_of_each(rng: np.random.Generator, n: int, shares: Floats, runs: Floats) -> Ints:
    """Draw the phase (the index of a mean) of each of n gaps between arrivals. Successive gaps of one phase form runs
    of random, geometrically distributed length. The phase of a run is drawn with a probability in proportion to the
    phase's share divided by its mean run length, so that each phase's fraction of the gaps is its share.
    """
    by_run = shares / runs / (shares / runs).sum()
    index = np.arange(len(shares), dtype=np.float64)
    # What is left of a run with a geometric length is geometric, too. So the process is stationary if the first phase
    # is drawn by the shares.
    phases = [draw_choice(rng, 1, index, shares).astype(np.int64)]
    lengths = [rng.geometric(1.0 / runs[phases[0]])]
    have = int(lengths[0].sum())
    while have < n:
        more = int((n - have) / float((by_run * runs).sum())) + 16
        phases.append(draw_choice(rng, more, index, by_run).astype(np.int64))
        lengths.append(rng.geometric(1.0 / runs[phases[-1]]))
        have += int(lengths[-1].sum())
    each: Ints = np.repeat(np.concatenate(phases), np.concatenate(lengths))[:n]
    return each


def _poisson_gap(rng: np.random.Generator, n: int, rate: float) -> Floats:
    mean = np.where(np.arange(n) < n // 3, 0.5 / rate, 1.0 / rate)
    return np.cumsum(rng.poisson(mean).astype(np.float64))


def _repeated(times: Floats, n: int, rate: float) -> Floats:
    if len(times) < n:
        # each repetition of the times starts one mean gap after the end of the previous one
        gap = times[-1] / max(len(times) - 1, 1)
        rounds = -(-n // len(times))
        times = np.concatenate([times + k * (times[-1] + gap) for k in range(rounds)])
    times = times[:n]
    if not math.isnan(rate):
        if n > 1 and times[-1] == 0:
            raise InputError("the arrivals are all at the same time, so they have no rate; omit --rate", field="rate")
        own = (n - 1) / times[-1] if n > 1 else rate
        times = times * (own / rate)
    return times


# -- GPU counts


def parse_gpu_mix(text: str) -> tuple[Floats, Floats]:
    """Return (GPU counts, probabilities) from a text like 1:70,2:10,4:15,8:5. Counts may be fractions of one GPU
    (0.5:20). Weights may have any sum.
    """
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
        f"{part.strip()!r} in {text!r} is not GPUS:WEIGHT, or repeats a GPU count; write the mix like "
        "1:70,2:10,4:15,8:5",
        field="gpu-mix",
    )


def draw_choice(rng: np.random.Generator, n: int, values: Floats, probabilities: Floats) -> Floats:
    """Draw n of the values with these probabilities."""
    edges = np.cumsum(probabilities)
    chosen: Floats = values[np.minimum(np.searchsorted(edges, rng.random(n), side="right"), len(values) - 1)]
    return chosen
