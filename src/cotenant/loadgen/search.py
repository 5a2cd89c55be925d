"""Search of the highest load that keeps the SLOs: a factor on all rates, found by tests on the running server."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from cotenant.core.errors import InputError

GROW = 1.5
MOST_PROBES, CONFIRMATIONS = 24, 6
LEAST_FACTOR = 1e-3


class Outcome(Protocol):
    """The part of a load test's result that the search uses."""

    @property
    def attainment(self) -> float:
        """Return the lowest SLO attainment of any service or model, 0..1."""

    @property
    def answered_rps(self) -> float:
        """Return the answered requests per second."""


R = TypeVar("R", bound=Outcome)


@dataclass(frozen=True)
class Probe(Generic[R]):
    """One load test of the search: the factor on the rates, whether the SLOs were kept, and the result."""

    factor: float
    held: bool
    attainment: float
    rps: float
    result: R = field(repr=False)


@dataclass(frozen=True)
class Found(Generic[R]):
    """Result of a search for the highest load. `factor` 0: even the smallest load missed an SLO. `open_ended`: the
    search ended before any test failed, so a higher load may be possible. `confirmed`: a final, longer run at `factor`
    also kept the SLOs.
    """

    factor: float
    probes: tuple[Probe[R], ...]
    open_ended: bool
    confirmed: bool
    final: R | None


def find_max(
    probe: Callable[[float, int], R], target: float = 0.99, tolerance: float = 0.05,
    confirm: Callable[[float, int], R] | None = None, note: Callable[[Probe[R]], None] | None = None,
    step: float = 0.0,
) -> Found[R]:  # fmt: skip
    """Find the largest factor on the load at which the SLOs hold, by tests. `probe(factor, number)` runs a test and
    returns its result; `number` counts the tests from 0, so that each can have other random requests.

    The search raises the factor from 1 (or lowers it, if the first test fails) until one test passed and one failed,
    then bisects the interval geometrically to `tolerance`. A higher load can pass where a lower one failed, so the
    result is only a factor that passed, next to one that failed. `confirm` runs a longer test at that factor; if
    it fails, `confirm` tests smaller factors.

    `step`: only multiples of it are tested. With a load of 8 requests in flight the step is 1/8, so that each tested
    load is a whole number of requests.
    """
    if not 0 < target <= 1:
        raise InputError(f"target must be above 0 % and at most 100 %, not {100 * target:g} %", field="target")
    if not 0.001 <= tolerance < 1:
        raise InputError(f"tolerance must be between 0.001 and 1, not {tolerance:g}", field="tolerance")
    probes: list[Probe[R]] = []

    def run(factor: float) -> bool:
        result = probe(factor, len(probes))
        done = Probe(factor, result.attainment >= target, result.attainment, result.answered_rps, result)
        probes.append(done)
        if note is not None:
            note(done)
        return done.held

    least = max(step, LEAST_FACTOR)
    low, high, factor = 0.0, math.inf, 1.0
    while len(probes) < MOST_PROBES:
        if run(factor):
            low = max(low, factor)
        else:
            high = min(high, factor)
        if low and (high / low <= 1 + tolerance or high - low < 1.5 * step):
            break
        if low and high < math.inf:
            factor = math.sqrt(low * high)
        else:
            factor = factor * GROW if high == math.inf else high / GROW
        if step:
            factor = round(factor / step) * step if low else math.floor(factor / step + 1e-6) * step
        if factor < least * (1 - 1e-6):
            break
    open_ended = high == math.inf
    if confirm is None or not low:
        return Found(low, tuple(probes), open_ended, False, None)
    # confirm the factor that passed; if it fails now, confirm smaller ones, in growing steps
    for again in range(CONFIRMATIONS):
        final = confirm(low, len(probes) + again)
        if final.attainment >= target:
            return Found(low, tuple(probes), open_ended and not again, True, final)
        lower = low / (1 + tolerance) ** (again + 1)
        low = lower if not step else min(math.floor(lower / step + 1e-6) * step, low - step)
        if low < least * (1 - 1e-6):
            break
    return Found(0.0, tuple(probes), False, False, None)
