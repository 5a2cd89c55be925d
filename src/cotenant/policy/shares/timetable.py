"""How the time of a GPU is divided among tenants, and how long their turns are in a period of a timetable."""

from __future__ import annotations

import math
from collections.abc import Mapping


def turn_lengths(parts: Mapping[str, float], period_ns: int, turn_ns: int, number: int) -> dict[str, float]:
    """Return the length of each tenant's turn in period `number`, in nanoseconds. Over several periods, a tenant gets
    its part of the time. A tenant whose turn would be shorter than `turn_ns` has a longer turn in only some of the
    periods.
    """
    lengths = dict[str, float]()
    for index, (name, part) in enumerate(parts.items()):
        if 0 < part * period_ns < turn_ns:
            every = math.ceil(turn_ns / (part * period_ns))
            lengths[name] = every * part * period_ns if (number + index) % every == 0 else 0.0
    rare_ns, rest = sum(lengths.values()), sum(part for name, part in parts.items() if name not in lengths)
    fit = min(1.0, period_ns / rare_ns) if rare_ns else 1.0
    left_ns = (period_ns * sum(parts.values()) - rare_ns * fit) / rest if rest else 0.0
    return {name: lengths[name] * fit if name in lengths else part * max(0.0, left_ns) for name, part in parts.items()}


def divide(weights: Mapping[str, float], limits: Mapping[str, float]) -> dict[str, float]:
    """Divide a whole (1) among tenants by weight, so that each part is at most the tenant's limit. What tenants do not
    get because of their limits is divided among the others. If all parts are at their limits, some of the whole
    remains.
    """
    parts = dict.fromkeys(weights, 0.0)
    left, open_ = 1.0, dict(weights)
    while open_ and left > 1e-12:
        weight = sum(open_.values())
        full = [name for name, own in open_.items() if left * own / weight >= limits[name] - 1e-12]
        if not full:
            return parts | {name: left * own / weight for name, own in open_.items()}
        for name in full:
            parts[name] = limits[name]
            del open_[name]
        left = 1.0 - sum(parts.values())
    return parts
