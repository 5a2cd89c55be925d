"""Fits the coefficients of a model's step times to measured points: least squares of relative errors, no coefficient
below 0.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from cotenant.core.errors import InputError
from cotenant.profiles.llm.profile import Step, StepTimes

BOOTSTRAPS = 400


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


@dataclass(frozen=True)
class Fit:
    """Result of a fit of step times: the coefficients, and predicted / measured - 1 for each point."""

    times: StepTimes
    points: tuple[Point, ...]
    residuals: tuple[float, ...]

    @property
    def worst(self) -> float:
        """Return the largest relative error of the fit."""
        return max(map(abs, self.residuals))

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
    """Fit the step times of prefill and of decode separately. InputError if one of them has fewer than three points."""
    prefill = [p for p in points if p.step.tokens]
    decode = [p for p in points if p.step.sequences]
    if min(len(prefill), len(decode)) < 3:
        raise InputError("a profile needs 3 points of prefill and 3 of decode at least")
    first = _nonnegative([(1.0, p.step.tokens, p.step.pairs) for p in prefill], [p.median_s for p in prefill])
    second = _nonnegative([(1.0, p.step.sequences, p.step.context) for p in decode], [p.median_s for p in decode])
    times = StepTimes(*first, *second)
    return Fit(times, tuple(points), tuple(times.seconds(p.step) / p.median_s - 1 for p in points))


def _nonnegative(rows: Sequence[tuple[float, ...]], values: Sequence[float]) -> list[float]:
    """Return the least-squares solution of relative errors with coefficients of at least 0: the best solution over all
    subsets of columns that has no negative coefficient.
    """
    width = len(rows[0])
    scaled = [[x / v for x in row] for row, v in zip(rows, values, strict=True)]
    best, best_error = [0.0] * width, float(len(rows))
    for columns in itertools.chain.from_iterable(itertools.combinations(range(width), n) for n in range(1, width + 1)):
        found = _solve([[row[c] for c in columns] for row in scaled])
        if found is None or min(found) < 0:
            continue
        error = sum((sum(x * row[c] for x, c in zip(found, columns, strict=True)) - 1) ** 2 for row in scaled)
        if error < best_error - 1e-12:
            best_error = error
            best = [0.0] * width
            for c, x in zip(columns, found, strict=True):
                best[c] = x
    return best


def _solve(rows: list[list[float]]) -> list[float] | None:
    """Return the vector x for which the products of `rows` and x come closest to 1 (least squares), by the normal
    equations with scaled columns; None if these equations are singular."""
    size = len(rows[0])
    scale = [max(abs(row[c]) for row in rows) or 1.0 for c in range(size)]
    a = [[sum(r[i] * r[j] for r in rows) / (scale[i] * scale[j]) for j in range(size)] for i in range(size)]
    b = [sum(r[i] for r in rows) / scale[i] for i in range(size)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(a[r][i]))
        if abs(a[pivot][i]) < 1e-12:
            return None
        a[i], a[pivot], b[i], b[pivot] = a[pivot], a[i], b[pivot], b[i]
        for r in range(i + 1, size):
            factor = a[r][i] / a[i][i]
            a[r] = [x - factor * y for x, y in zip(a[r], a[i], strict=True)]
            b[r] -= factor * b[i]
    x = [0.0] * size
    for i in reversed(range(size)):
        x[i] = (b[i] - sum(a[i][j] * x[j] for j in range(i + 1, size))) / a[i][i]
    return [v / s for v, s in zip(x, scale, strict=True)]
