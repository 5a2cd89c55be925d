"""Assigns models to jobs without one: classes by their shares, and the models of a class in rotation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import lcm

import numpy as np

from cotenant.core.errors import InputError
from cotenant.core.work import Ints, Names
from cotenant.workloads.jobs.draws import stream
from cotenant.workloads.trace_options import SPLIT_MODES

CLASSES = ("image", "language", "speech")


def parse_split(text: str) -> tuple[Fraction, ...]:
    """Return the shares of image, language and speech jobs from a text like "20,70,10". The numbers may have any sum.
    """
    parts = text.split(",")
    try:
        shares = tuple(Fraction(part.strip().removesuffix("%")).limit_denominator(1000) for part in parts)
    except (ValueError, ZeroDivisionError):
        shares = ()
    if len(shares) != len(CLASSES) or any(not 0 <= share <= 1_000_000 for share in shares) or sum(shares) == 0:
        raise InputError(
            f"{text!r} is not a split; write the shares of {', '.join(CLASSES)} like 20,70,10", field="split"
        )
    return shares


def assign_models(
    n: int, split: str, classes: Mapping[str, Sequence[str]], *, mode: str = "overall", seed: int = 0
) -> Names:
    """Return the model names of n jobs in arrival order. `classes` maps image, language and speech to their models.

    Mode overall, without randomness: each job gets the class that is furthest below its share so far (ties: the first
    of image, language, speech). Mode random: the class is drawn by its share, with the seed. In both modes the models
    of a class are assigned in rotation.
    """
    shares = parse_split(split)
    for name, share in zip(CLASSES, shares, strict=True):
        if share and not classes.get(name):
            raise InputError(f"the profile has no {name} models, but the split asks for {name} jobs", field="split")
    if mode == "overall":
        codes = _largest_deficit(n, shares)
    elif mode == "random":
        edges = np.cumsum(np.array([float(share) for share in shares]) / float(sum(shares)))
        drawn = np.searchsorted(edges, stream(seed, "models").random(n), side="right")
        # rounding may leave the last edge below 1, so a number above it also means the last class with a share
        last = max(k for k, share in enumerate(shares) if share)
        codes = np.minimum(drawn, last)
    else:
        raise InputError(f"unknown split mode {mode!r}; it is {' or '.join(SPLIT_MODES)}", field="split-mode")
    models = np.full(n, "", dtype=object)
    for code, name in enumerate(CLASSES):
        rows = np.flatnonzero(codes == code)
        if len(rows):
            models[rows] = np.array(classes[name], dtype=object)[np.arange(len(rows)) % len(classes[name])]
    return models


def _largest_deficit(n: int, shares: tuple[Fraction, ...]) -> Ints:
    """Return the class (image, language or speech) of each of n jobs as an index of CLASSES. A job gets the class with
    the largest deficit, which is the share of the class minus its fraction of the jobs so far. Deficits are computed as
    integers, multiplied by a common factor, so that equal deficits compare as equal.

    A choice depends only on the deficits. So when deficits occur that have occurred before, the sequence repeats.
    """
    scale = lcm(*(share.denominator for share in shares))
    targets = [int(share * scale) for share in shares]
    total = sum(targets)
    # a class without a share must not be chosen when deficits are equal
    wanted = [c for c, target in enumerate(targets) if target]
    # After k jobs, of which `count` have class c, the deficit of class c is targets[c] / total - count / k. lack[c] is
    # this deficit times k * total, which is an integer. At k = 0 the class with the largest share is chosen.
    lack = [0] * len(targets)
    chosen: list[int] = []
    seen: dict[tuple[int, ...], int] = {}
    for k in range(n):
        key = tuple(lack)
        if k and key in seen:
            start = seen[key]
            cycle = np.array(chosen[start:], dtype=np.int64)
            rest = np.resize(cycle, n - k)
            return np.concatenate([np.array(chosen, dtype=np.int64), rest])
        if k:
            seen[key] = k
        pick = max(wanted, key=lambda c: (lack[c] if k else targets[c], -c))
        chosen.append(pick)
        lack = [have + target for have, target in zip(lack, targets, strict=True)]
        lack[pick] -= total
    return np.array(chosen, dtype=np.int64)
