"""Replanning: lists the moves from one plan to the next, numbers the GPUs of a new plan so that as few gpulets as
possible move, and finds the fewest GPUs that suffice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cotenant.core.serving import Gpulet, Service, ServingPlan
from cotenant.policy.serving.packing.planners import Packer
from cotenant.policy.serving.packing.specs import Spec
from cotenant.policy.serving.packing.tables import Gpus


@dataclass(frozen=True)
class Move:
    """One step from an old serving plan to a new one. `kind`: load or unload a service on a gpulet (part of a GPU),
    create or remove a gpulet, or rebatch, which changes the sizes of a gpulet's batches without downtime.
    """

    kind: str
    gpu: int
    partition: str
    service: str | None = None


def _holding(lets: Sequence[Gpulet]) -> Counter[tuple[str, tuple[str, ...]]]:
    """Count the gpulets (parts of GPUs) for each combination of (partition, services)."""
    return Counter((let.partition, tuple(sorted(s.service for s in let.seats))) for let in lets)


def _by_gpu(plan: ServingPlan) -> dict[int, list[Gpulet]]:
    out: dict[int, list[Gpulet]] = {}
    for let in plan.gpulets:
        out.setdefault(let.gpu, []).append(let)
    return out


def _alike(a: Sequence[Gpulet], b: Sequence[Gpulet]) -> float:
    """Return how well a GPU's new gpulets (parts) keep its old ones: 1 for each equal gpulet, less if only the
    partition is equal.
    """
    same = (_holding(a) & _holding(b)).total()
    sizes = (Counter(x.partition for x in a) & Counter(x.partition for x in b)).total()
    shared = len({s.service for x in a for s in x.seats} & {s.service for x in b for s in x.seats})
    return same + 0.1 * sizes + 0.01 * shared


def renamed(new: ServingPlan, old: ServingPlan, gpus: Gpus) -> ServingPlan:
    """Renumber the GPUs of the new plan, within each type, so that as many gpulets (parts of GPUs) as possible stay on
    their GPU.
    """
    before, after = _by_gpu(old), _by_gpu(new)
    name: dict[int, int] = {}
    for t in range(len(gpus.profiles)):
        targets = [g for g, x in enumerate(gpus.types) if x == t]
        sources = [g for g in targets if g in after]
        pairs = sorted(
            ((_alike(before.get(to, ()), after[at]), -to, -at) for at in sources for to in targets), reverse=True
        )
        taken: set[int] = set()
        for _, to, at in pairs:
            if -at not in name and -to not in taken:
                name[-at] = -to
                taken.add(-to)
    moved = [replace(x, gpu=name[x.gpu]) for x in new.gpulets]
    return replace(new, gpulets=tuple(sorted(moved, key=lambda x: (x.gpu, x.slot))))


def moves(old: ServingPlan, new: ServingPlan) -> list[Move]:
    """Return what changes from one serving plan to the next, GPU by GPU."""
    before, after = _by_gpu(old), _by_gpu(new)
    out = []
    for gpu in sorted(before.keys() | after.keys()):
        was, now = list(before.get(gpu, ())), list(after.get(gpu, ()))
        # gpulets on equal partitions count as the same one; of these, pairs with the most services in common are
        # matched first
        pairs = sorted(
            ((len(_services(a) & _services(b)), -i, -j) for i, a in enumerate(was) for j, b in enumerate(now)
             if a.partition == b.partition), reverse=True,
        )  # fmt: skip
        left, right = set(range(len(was))), set(range(len(now)))
        for _, i, j in pairs:
            if -i in left and -j in right:
                left.discard(-i)
                right.discard(-j)
                out += _changed(was[-i], now[-j])
        out += [Move("remove", gpu, was[i].partition) for i in sorted(left)]
        for j in sorted(right):
            out.append(Move("create", gpu, now[j].partition))
            out += [Move("load", gpu, now[j].partition, s.service) for s in now[j].seats]
    return out


def _services(let: Gpulet) -> set[str]:
    return {s.service for s in let.seats}


def _changed(a: Gpulet, b: Gpulet) -> list[Move]:
    gone, come = sorted(_services(a) - _services(b)), sorted(_services(b) - _services(a))
    out = [Move("unload", b.gpu, b.partition, s) for s in gone] + [Move("load", b.gpu, b.partition, s) for s in come]
    if not out and {(s.service, s.batch) for s in a.seats} != {(s.service, s.batch) for s in b.seats}:
        out.append(Move("rebatch", b.gpu, b.partition))
    return out


def disruption(steps: Sequence[Move]) -> int:
    """Return how many steps of a change of plans load a model or change a partition."""
    return sum(step.kind != "rebatch" for step in steps)


class Sizer:
    """Finds the least number of GPUs, taken from the start of a list, that suffices when the rates of the services
    change. It keeps the planners' tables between calls.
    """

    def __init__(self, spec: Spec, gpus: Gpus, services: Sequence[Service], time_limit_s: float = 5.0) -> None:
        self.spec, self.gpus, self.services, self.time_limit_s = spec, gpus, list(services), time_limit_s
        self._packers: dict[int, Packer] = {}

    def packer(self, count: int) -> Packer:
        """Return the planner for the first `count` GPUs."""
        if count not in self._packers:
            first = self.gpus.first(count)
            self._packers[count] = Packer(self.spec, first, self.services, time_limit_s=self.time_limit_s)
        return self._packers[count]

    def fewest(self, rates_rps: Sequence[float]) -> ServingPlan:
        """Return a plan for these rates on as few GPUs as the planner needs; if none is feasible, the best plan on all
        GPUs.
        """
        whole = self.packer(len(self.gpus))
        best = whole.plan(rates_rps)
        if not best.feasible:
            return best
        least = max(1, math.ceil(len(self.gpus) / whole.bound(np.asarray(rates_rps, float)) - 1e-9))
        if whole.small:
            for count in range(least, best.gpus_used):
                plan = self.packer(count).plan(rates_rps)
                if plan.feasible:
                    return plan
            return best
        while best.gpus_used > least:
            plan = self.packer(best.gpus_used - 1).plan(rates_rps)
            if not plan.feasible:
                return best
            best = plan
        return best


def fewest_gpus(
    spec: Spec, gpus: Gpus, services: Sequence[Service], rates_rps: Sequence[float], time_limit_s: float = 5.0
) -> ServingPlan:
    """Return a serving plan on as few of the GPUs (taken in order) as the planner needs; if none is feasible, the plan
    on all GPUs.
    """
    return Sizer(spec, gpus, services, time_limit_s).fewest(rates_rps)
