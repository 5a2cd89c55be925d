"""Fits the linear model of interference between neighbours on a GPU to measured pairs of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cotenant.core.errors import InputError
from cotenant.core.textfile import cell_number, csv_columns
from cotenant.profiles.serving.latency import Interference

LEAST = 8
COLUMNS = ("l2", "dram", "fraction", "l2_other", "dram_other", "fraction_other", "alone_ms", "together_ms")


@dataclass(frozen=True)
class Pair:
    """One measurement of two models that share a GPU. `l2`, `dram`: the first model's utilisation of the L2 cache and
    DRAM, 0 to 1, when it runs alone on the whole GPU; `fraction`: its part of the GPU. The fields with `_other` are
    those of the second model. `slowdown`: that of the first model.
    """

    l2: float
    dram: float
    fraction: float
    l2_other: float
    dram_other: float
    fraction_other: float
    slowdown: float


@dataclass(frozen=True)
class Fit:
    """The fitted model and the relative errors of its slowdowns on the measured pairs, at two quantiles."""

    model: Interference
    error_p90: float
    error_p95: float
    pairs: int


def fit_interference(pairs: Sequence[Pair]) -> Fit:
    """Fit the interference model by least squares of slowdown = max(1, linear). A pair whose measured slowdown is 1 and
    whose fitted one is at most 1 carries no further information. Such pairs are left out and the fit is repeated, until
    the set of these pairs no longer changes.
    """
    if len(pairs) < LEAST:
        raise InputError(f"{len(pairs)} pairs do not fix five coefficients; measure at least {LEAST}")
    rows = np.array(
        [
            (x.l2 * x.fraction, x.l2_other * x.fraction_other, x.dram * x.fraction, x.dram_other * x.fraction_other, 1)
            for x in pairs
        ]
    )
    slowdown = np.array([p.slowdown for p in pairs])
    if not np.isfinite(rows).all() or not np.isfinite(slowdown).all() or (slowdown <= 0).any():
        raise InputError("utilisations and slowdowns must be finite, slowdowns positive")
    floor = slowdown <= 1.0 + 1e-9
    used = ~floor if (~floor).sum() >= LEAST else np.ones(len(pairs), bool)
    for _ in range(50):
        coefficients = np.linalg.lstsq(rows[used], slowdown[used], rcond=None)[0]
        now = ~(floor & (rows @ coefficients <= 1.0))
        if now.sum() < LEAST or (now == used).all():
            break
        used = now
    error = np.abs(np.maximum(1.0, rows @ coefficients) - slowdown) / slowdown
    p90, p95 = np.quantile(error, (0.9, 0.95))
    return Fit(Interference(*(float(c) for c in coefficients)), float(p90), float(p95), len(pairs))


def read_pairs(path: str | Path) -> list[Pair]:
    """Read measured pairs of models from a CSV file with the columns in COLUMNS; the slowdown is together_ms /
    alone_ms.
    """
    out = []
    for line, row in csv_columns(path, COLUMNS):
        values = [cell_number(row[c], path, line, c) for c in COLUMNS]
        if values[6] <= 0 or values[7] <= 0:
            raise InputError("times must be positive", file=path, line=line)
        l2, dram, own, l2_other, dram_other, other, alone_ms, together_ms = values
        out.append(Pair(l2, dram, own, l2_other, dram_other, other, together_ms / alone_ms))
    return out
