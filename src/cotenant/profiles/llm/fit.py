"""Fits the coefficients of a model's step times to measured points: least squares of relative errors, no coefficient
below 0.

A point whose step has prompt tokens alone is the time to the first token of a single request, so it contains what the
request spends outside of steps. A point whose step also decodes is the length of that step alone.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from cotenant.core.errors import InputError
from cotenant.core.extras import needs
from cotenant.core.units import counted
from cotenant.profiles.llm.profile import Step, StepTimes

with needs("serve"):
    import numpy as np

BOOTSTRAPS = 400
LEAST = 3  # points of prefill, and of decode, that a fit needs
BAD = 0.1  # a fit with a larger relative error at a point is bad
# A least time of steps with prompts is assumed only if the squared errors are at most this part of those without it.
WORTH = 0.25


@dataclass(frozen=True)
class Point:
    """Measured durations, in seconds, of one kind of step of a language model's engine."""

    step: Step
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Return the median of the measured durations of the step."""
        return median(self.seconds)

    def interval(self, seed: int = 0) -> tuple[float, float]:
        """Return the 95 % confidence interval of the median duration, by bootstrap."""
        rng = random.Random(seed)
        count = len(self.seconds)
        found = sorted(median(rng.choices(self.seconds, k=count)) for _ in range(BOOTSTRAPS))
        return found[round(0.025 * (BOOTSTRAPS - 1))], found[round(0.975 * (BOOTSTRAPS - 1))]

    @property
    def width(self) -> float:
        """Return the width of the interval, relative to the median."""
        low, high = self.interval()
        return (high - low) / self.median_s

    def __str__(self) -> str:
        """Return what the step computes, in words."""
        if self.step.tokens:
            return f"a prefill of {counted(self.step.tokens, 'token')}" + " beside a decode" * bool(self.step.sequences)
        of = counted(self.step.sequences, "request")
        return f"a decode step of {of} with {counted(self.step.context, 'token')} of context"


@dataclass(frozen=True)
class Fit:
    """Result of a fit of step times: the coefficients, the seconds that a request spends outside of steps, and
    predicted / measured - 1 for each point."""

    times: StepTimes
    request_s: float
    points: tuple[Point, ...]
    residuals: tuple[float, ...]

    @property
    def worst(self) -> float:
        """Return the largest relative error of the fit."""
        return max(map(abs, self.residuals))

    def warning(self) -> str | None:
        """Return a sentence about the worst point if the fit is bad; else None."""
        if self.worst <= BAD:
            return None
        at, off = max(zip(self.points, self.residuals, strict=True), key=lambda row: abs(row[1]))
        took_ms, is_ms = at.median_s * 1e3, at.median_s * (1 + off) * 1e3
        took = f"{at} took {took_ms:.1f} ms (95 % interval {at.width:.0%} wide)"
        return f"the fit is bad: {took} and is predicted as {is_ms:.1f} ms, so simulated times may be as wrong"

    def measured(self) -> dict[str, Any]:
        """Return the entry of a profile's file that describes the measured points."""
        rows = []
        for point, residual in zip(self.points, self.residuals, strict=True):
            low, high = point.interval()
            rows.append({
                **{k: v for k, v in vars(point.step).items() if v}, "ms": point.median_s * 1e3,
                "ms_ci95": [low * 1e3, high * 1e3], "times": len(point.seconds), "residual": residual,
            })  # fmt: skip
        return {"points": rows, "worst_residual": self.worst}


def fit(points: Sequence[Point]) -> Fit:
    """Fit the step times of prefill and of decode separately. Those of prefill are fitted to the steps that decode,
    too, if there are three of them at least. InputError if the others have fewer than three points of either kind.
    """
    single = [p for p in points if not p.step.sequences]
    decode = [p for p in points if not p.step.tokens]
    beside = [p for p in points if p.step.tokens and p.step.sequences]
    if min(len(single), len(decode)) < LEAST:
        raise InputError(f"a profile needs {LEAST} points of prefill and {LEAST} of decode at least")
    second = _nonnegative([(1.0, p.step.sequences, p.step.context) for p in decode], [p.median_s for p in decode])
    prefill = beside if len(beside) >= LEAST else single
    # what a prefill adds to the requests that decode in the same step
    times = _with_prefill(prefill, second)
    outside = [p.median_s - times.seconds(p.step) for p in single]
    request_s = max(0.0, median(outside)) if prefill is beside else 0.0
    found = [times.seconds(p.step) + request_s * (not p.step.sequences) for p in points]
    return Fit(times, request_s, tuple(points), tuple(x / p.median_s - 1 for x, p in zip(found, points, strict=True)))


def _with_prefill(points: Sequence[Point], decode: Sequence[float]) -> StepTimes:
    """Return the step times with these coefficients of decode and those of prefill that fit the points best: either
    without a least time, or with one that the points with fewest tokens take. The others are then limited by the GPU,
    which reads the weights once, as in a decode step.
    """

    def coefficients(columns: Sequence[tuple[float, ...]], points: Sequence[Point], base: float = 0.0) -> list[float]:
        work = [p.median_s - base - decode[1] * p.step.sequences - decode[2] * p.step.context for p in points]
        return _nonnegative(columns, [max(x, 1e-9) for x in work])

    def error(times: StepTimes) -> float:
        return sum((times.seconds(p.step) / p.median_s - 1) ** 2 for p in points)

    found = StepTimes(*coefficients([(1.0, p.step.tokens, p.step.pairs) for p in points], points), *decode)
    most = error(found) * WORTH
    ordered = sorted(points, key=lambda p: p.step.tokens)
    for count in range(2, len(ordered)):
        short, long = ordered[:count], ordered[count:]
        least = sum(1 / p.median_s for p in short) / sum(1 / p.median_s**2 for p in short)
        slopes = coefficients([(p.step.tokens, p.step.pairs) for p in long], long, decode[0])
        times = replace(StepTimes(decode[0], *slopes, *decode), prefill_least=least)
        if error(times) < most:
            found, most = times, error(times)
    return found


def _nonnegative(rows: Sequence[tuple[float, ...]], values: Sequence[float]) -> list[float]:
    """Return the least-squares solution of relative errors with coefficients of at least 0: the best solution over all
    subsets of columns that has no negative coefficient.
    """
    scaled = np.array(rows) / np.array(values)[:, None]
    width = scaled.shape[1]
    best, best_error = np.zeros(width), float(len(rows))
    for columns in itertools.chain.from_iterable(itertools.combinations(range(width), n) for n in range(1, width + 1)):
        part = scaled[:, columns]
        scale = np.maximum(part.max(axis=0), 1e-300)
        found, _, rank, _ = np.linalg.lstsq(part / scale, np.ones(len(part)), rcond=1e-6)
        if rank < len(columns) or found.min() < 0:
            continue
        error = float(((part @ (found / scale) - 1) ** 2).sum())
        if error < best_error - 1e-12:
            best_error, best = error, np.zeros(width)
            best[list(columns)] = found / scale
    return [float(x) for x in best]
