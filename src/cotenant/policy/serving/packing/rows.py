"""Converts serving plans to the rows of a packing state, the arrays of a search, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cotenant.core.serving import Gpulet, Seat, Service, ServingPlan
from cotenant.policy.serving.packing.adjust import settle_all
from cotenant.policy.serving.packing.kernel import State, Tables
from cotenant.policy.serving.packing.search import empty_all
from cotenant.policy.serving.packing.shared import SharedTable
from cotenant.policy.serving.packing.tables import Gpus
from cotenant.profiles.serving.mig_layout import starts


def place_as(
    T: Tables, gpus: Gpus, services: Sequence[Service], A: State, start: ServingPlan, rates: Mapping[str, float], *,
    own: float | None = None,
) -> None:  # fmt: skip
    """Write a plan's gpulets (parts of GPUs) into a packing state. Each service's rate is divided among its gpulets in
    proportion to its capacity there. If `own` is given, each service instead gets `own` times the rate that the plan
    gave it on the gpulet.
    """
    index = {s.name: i for i, s in enumerate(services)}
    empty_all(A)
    capacity = start.capacities()
    copies: dict[tuple[int, int, str], int] = {}
    for let in start.gpulets:
        seats = _together(T, [(index[s.service], s) for s in let.seats if s.service in index])
        if let.gpu >= len(gpus) or not seats:
            continue
        profile = gpus.profile_of(let.gpu)
        size = profile.partition(let.partition)
        key = (let.gpu, let.instance, let.partition)
        j = copies.get(key, -1) if size.processes > 1 else -1
        if j < 0:
            j = copies[key] = int(np.argmax(A["part"][let.gpu] < 0))
            A["rate"][let.gpu, j] = 0.0
        A["part"][let.gpu, j], A["inst"][let.gpu, j] = profile.partitions.index(size), let.instance
        A["count"][let.gpu, j] = len(seats)
        for k, (i, seat) in enumerate(seats):
            A["svc"][let.gpu, j, k] = i
            share = let.capacity_rps(seat) / capacity[seat.service]
            rate = seat.rate_rps * own if own is not None else rates[seat.service] * min(1.0, share)
            A["rate"][let.gpu, j, k] += rate


def _together(T: Tables, seats: list[tuple[int, Seat]]) -> list[tuple[int, Seat]]:
    """Return those (service, seat) of a gpulet (part of a GPU) that may share it. If both latency-sensitive and
    best-effort services are there, the latency-sensitive ones stay.
    """
    groups = T.svc["group"]
    stays = max((groups[i] for i, _ in seats), default=0)
    return [(i, seat) for i, seat in seats if groups[i] == stays][: T.seats]


def place_patterns(T: Tables, table: SharedTable, chosen: Sequence[int], rates: np.ndarray, out: State) -> bool:
    """Write the chosen patterns (ways to divide a GPU) into the packing state `out`, each to one GPU, and divide the
    rates among their gpulets (parts). Returns False if no pattern was chosen, if the state exceeds an SLO, or if a
    gpulet has more models than it may.
    """
    empty_all(out)
    if not chosen:
        return False
    total = table.caps[list(chosen)].sum(axis=0)
    free = {int(t): np.nonzero(T.gpu_type == t)[0].tolist() for t in set(table.kind[list(chosen)].tolist())}
    for c in chosen:
        g = free[int(table.kind[c])].pop(0)
        for j, (p, given) in enumerate(zip(table.parts[c].tolist(), table.rates[c], strict=True)):
            members = np.nonzero(given)[0]
            if len(members) > T.seats:
                return False
            if p >= 0:
                row = out[g, j]
                row["part"], row["inst"], row["count"] = p, 0, len(members)
                row["svc"][: len(members)] = members
                row["rate"][: len(members)] = given[members] * rates[members] / total[members]
    return bool(settle_all(T, out))


def gpulets(gpus: Gpus, state: State, g: int, services: Sequence[Service]) -> list[Gpulet]:
    """Return the gpulets (parts) of GPU g as a plan has them, one for each process, with the places of their MIG
    instances.
    """
    profile, rows = gpus.profile_of(g), state[g]
    used = np.nonzero(rows["count"])[0].tolist()
    sizes = {j: profile.partitions[int(rows["part"][j])] for j in used}
    kinds = {int(rows["inst"][j]): sizes[j].instance for j in used}
    if any(kinds.values()):
        at = dict(zip(kinds, starts(profile, list(kinds.values())), strict=True))
    else:
        at = dict.fromkeys(kinds, 0)
    out: list[Gpulet] = []
    for j in used:
        size = sizes[j]
        seats = tuple(
            Seat(services[s].name, services[s].model, int(rows["batch"][j, k]),
                 float(rows["rate"][j, k]) / size.processes)
            for k, s in enumerate(rows["svc"][j, : rows["count"][j]].tolist())
        )  # fmt: skip
        duty = float(rows["work"][j]) * (1 + 1e-10)
        for _ in range(size.processes):
            place = at[int(rows["inst"][j])]
            out.append(Gpulet(g, profile.gpu, size.label, size.percent, len(out), duty, seats, place))
    return out
