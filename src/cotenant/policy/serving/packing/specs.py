"""The registry of serving planners."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cotenant.core.errors import InputError
from cotenant.policy.serving.packing.tables import Rules

# hint for a plan that would serve all services without this rule
KEPT_APART = (
    "all services would fit if latency-sensitive and best-effort ones shared gpulets, which "
    "co-location excludes: allow more gpulets per GPU, smaller partitions or more GPUs"
)


@dataclass(frozen=True)
class Spec:
    """A planner: what it may do, how many attempts it climbs (0: it builds once), whether it covers with patterns
    exactly first, and whether it proves what it cannot place."""

    name: str
    help: str
    rules: Rules
    climb: int = 0
    cover: bool = False
    exact: bool = False

    def apart(self) -> Spec:
        """The same planner with services of both classes never sharing a gpulet, which is one process."""
        return replace(self, rules=replace(self.rules, apart=True))


PLANNERS: dict[str, Spec] = {
    spec.name: spec
    for spec in (
        Spec("temporal", "whole GPUs only; models take turns on one (squishy bin packing)", Rules(whole_only=True), 30),
        Spec("greedy", "space only: one model per gpulet, built in one pass; sees no interference",
             Rules(seats=1, interference=False)),
        Spec("gpulet", "space and time; sees no interference", Rules(interference=False), 12, cover=True),
        Spec("gpulet-interference", "space and time, batches chosen under the neighbours' interference",
             Rules(), 12, cover=True),
        Spec("exact", "a proven bound on the rates, and a mixed-integer search within a time limit",
             Rules(), 400, cover=True, exact=True),
    )
}  # fmt: skip
DEFAULT_PLANNER = "gpulet-interference"


def find_planner(name: str) -> Spec:
    """The planner of a name; InputError lists the known ones."""
    if name not in PLANNERS:
        raise InputError(f"unknown planner {name!r}; known: {', '.join(PLANNERS)}", field="planner")
    return PLANNERS[name]
