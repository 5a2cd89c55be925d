"""The highest load that keeps the SLOs: a factor on all rates, found by probes on the running server."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from cotenant.core.errors import InputError
from cotenant.loadgen.result import LoadResult

GROW = 1.5
MOST_PROBES, CONFIRMATIONS = 24, 6
LEAST_FACTOR = 1e-3


@dataclass(frozen=True)
class Probe:
    """One probe: the factor, whether the SLOs held, and what came out."""

    factor: float
    held: bool
    attainment: float
    rps: float
    result: LoadResult = field(repr=False)


@dataclass(frozen=True)
class Found:
    """`factor` 0: not even the smallest load held. `open_ended`: the search ended before anything failed, so that more
    may be possible. `confirmed`: a last, longer run at `factor` held as well."""

    factor: float
    probes: tuple[Probe, ...]
    open_ended: bool
    confirmed: bool
    final: LoadResult | None


def holds(result: LoadResult, target: float) -> bool:
    """Whether every service answered at least `target` of its requests in time."""
    return result.attainment >= target


def find_max(
    probe: Callable[[float, int], LoadResult], target: float = 0.99, tolerance: float = 0.05,
    confirm: Callable[[float, int], LoadResult] | None = None, note: Callable[[Probe], None] | None = None,
) -> Found:  # fmt: skip
    """Search upwards from factor 1 (downwards where that fails) until one held and one failed, then between them.

    The gap is halved (geometrically) to `tolerance`; `probe(factor, number)` runs one probe. Whether SLOs hold need not
    be monotone in load: what is reported is a factor that held, next to one that failed, and `confirm` runs it once
    more, and lower where that fails.
    """
    if not 0 < target <= 1:
        raise InputError(f"a target of {target:g} is not above 0 and at most 100 %", field="target")
    if not 0.001 <= tolerance < 1:
        raise InputError(f"a tolerance of {tolerance:g} is not between 0.001 and 1", field="tolerance")
    probes: list[Probe] = []

    def run(factor: float) -> bool:
        result = probe(factor, len(probes))
        done = Probe(factor, holds(result, target), result.attainment, result.answered_rps, result)
        probes.append(done)
        if note is not None:
            note(done)
        return done.held

    low, high, factor = 0.0, math.inf, 1.0
    while len(probes) < MOST_PROBES:
        if run(factor):
            low = max(low, factor)
        else:
            high = min(high, factor)
        if low and high / low <= 1 + tolerance:
            break
        if low and high < math.inf:
            factor = math.sqrt(low * high)
        else:
            factor = factor * GROW if high == math.inf else high / GROW
        if factor < LEAST_FACTOR:
            break
    open_ended = high == math.inf
    if confirm is None or not low:
        return Found(low, tuple(probes), open_ended, False, None)
    for step in range(CONFIRMATIONS):  # down from what held once, in steps that grow
        final = confirm(low, len(probes) + step)
        if holds(final, target):
            return Found(low, tuple(probes), open_ended and not step, True, final)
        low /= (1 + tolerance) ** (step + 1)
    return Found(0.0, tuple(probes), False, False, None)
