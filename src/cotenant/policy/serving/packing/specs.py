"""The registry of serving planners, which divide GPUs among services."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cotenant.core.errors import unknown_name
from cotenant.policy.serving.packing.tables import Rules

# the remark on a plan that fails only because latency-sensitive and best-effort services may not share gpulets
KEPT_APART = (
    "all services would fit if latency-sensitive and best-effort ones shared gpulets, which "
    "co-location excludes: allow more gpulets per GPU, smaller partitions or more GPUs"
)


@dataclass(frozen=True)
class Spec:
    """A planner: its rules, the number of packings that its search tries (0: it builds a plan in one pass), whether it
    first tries to cover the rates exactly with patterns (ways to divide a GPU), and whether it proves that what it
    cannot place is infeasible.
    """

    name: str
    help: str
    rules: Rules
    climb: int = 0
    cover: bool = False
    exact: bool = False

    def apart(self) -> Spec:
        """Return the same planner, with the rule that latency-sensitive and best-effort services never share a gpulet
        (part of a GPU), because a gpulet is one process.
        """
        return replace(self, rules=replace(self.rules, apart=True))


PLANNERS: dict[str, Spec] = {
    spec.name: spec
    for spec in (
        Spec("temporal", "whole GPUs, on which models take turns (squishy bin packing)", Rules(whole_only=True), 30),
        Spec("greedy", "divides GPUs, one model on each part, in one pass; ignores interference",
             Rules(seats=1, interference=False)),
        Spec("usher", "like greedy, but gives a batch all SMs that it can use, and searches for better plans (Usher)",
             Rules(seats=1, interference=False, full=True), 12, cover=True),
        Spec("gpulet", "divides GPUs, and models take turns on a part; ignores interference",
             Rules(interference=False), 12, cover=True),
        Spec("gpulet-interference", "like gpulet, but considers the neighbours' interference",
             Rules(), 12, cover=True),
        Spec("exact", "like gpulet-interference, and proves a bound on the rates within a time limit",
             Rules(), 400, cover=True, exact=True),
    )
}  # fmt: skip
DEFAULT_PLANNER = "gpulet-interference"


def find_planner(name: str) -> Spec:
    """Return the serving planner of that name. The InputError for an unknown name lists the known ones."""
    if name not in PLANNERS:
        raise unknown_name("planner", name, PLANNERS, "planner")
    return PLANNERS[name]
