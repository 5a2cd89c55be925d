"""How the time of a GPU is divided among tenants, and how long their turns are in a period of a timetable."""

from __future__ import annotations

import math
from collections.abc import Mapping

NO_REQUEST = 0.005  # part that each tenant without a request gets if the requests of others take the whole


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


def divide_by_request(requests: Mapping[str, float], limits: Mapping[str, float]) -> dict[str, float]:
    """Divide a whole (1) among tenants: each has its request, and those without a request (0) have what is left. If
    there are none, the rest is divided by request. Each part is at most the tenant's limit.
    """
    left = max(0.0, 1.0 - sum(requests.values()))
    spare = max(NO_REQUEST, left / max(1, sum(not request for request in requests.values())))
    return divide({name: request or spare for name, request in requests.items()}, limits)


def compensate(requests: Mapping[str, float], density: Mapping[str, float]) -> dict[str, float]:
    """Return the tenants' requests, lengthened so that what tenants use of them reaches the requests, as far as the
    unrequested time suffices. `density`: the fraction of its time that each tenant uses, above 0.
    """
    lacks = {name: request * (1.0 / density[name] - 1.0) for name, request in requests.items()}
    left, lack = 1.0 - sum(requests.values()), sum(lacks.values())
    paid = max(0.0, min(1.0, left / lack)) if lack > 0 else 0.0
    return {name: request + paid * lacks[name] for name, request in requests.items()}
