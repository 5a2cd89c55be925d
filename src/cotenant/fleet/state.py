"""Jobs, attempts to run them (each a run of a job's processes), and the assignments that planners make, as the
controller holds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.core.events import Reason
from cotenant.fleet.jobs import JobSpec

# states of a job; those after RUNNING do not change any more
WAITING, RUNNING, FINISHED, FAILED, CANCELLED = "waiting", "running", "finished", "failed", "cancelled"
OVER = (FINISHED, FAILED, CANCELLED)

# phases of an attempt to run a job; each is stored before the controller acts on it
STARTING, UP, STOPPING, PARKED, ENDED = "starting", "running", "stopping", "parked", "ended"


@dataclass(frozen=True)
class GpuShare:
    """A GPU of a job, or `fraction` of one, and the mechanism that enforces it. `instance`: UUID of a MIG instance.
    `limit`: largest fraction of the GPU that the job may use; None: `fraction`.
    """

    uuid: str
    fraction: float = 1.0
    mechanism: str = mechanisms.EXCLUSIVE
    slice: str | None = None
    instance: str | None = None
    limit: float | None = None


@dataclass(frozen=True)
class Place:
    """A job's resources on one node. `cpus` and `memory_bytes` are totals on that node."""

    node: str
    gpus: tuple[GpuShare, ...]
    cpus: float
    memory_bytes: int


@dataclass(frozen=True)
class Assignment:
    """The nodes and resources of a job. `level`: number of the allotment of CPU and memory (policy/jobs/allotment.py);
    `speed`: relative to the job's speed with the proportional share (the node's CPU and memory per GPU); `reserved`:
    whether a reservation started the job; `batch`: examples per step that the policy chose, 0: the job's own.
    """

    places: tuple[Place, ...]
    level: int = 0
    speed: float = 1.0
    reserved: bool = False
    batch: int = 0

    def same_gpus(self, other: Assignment) -> bool:
        """Whether another assignment has the same GPUs with the same mechanism."""
        return {p.node: set(p.gpus) for p in self.places} == {p.node: set(p.gpus) for p in other.places}

    @property
    def cpus(self) -> float:
        """Total cores."""
        return sum(p.cpus for p in self.places)

    @property
    def memory_bytes(self) -> int:
        """Total bytes."""
        return sum(p.memory_bytes for p in self.places)

    def gpus_by_node(self) -> list[tuple[str, float]]:
        """The number of GPUs held on each node: (node, GPUs)."""
        return [(p.node, round(sum(g.fraction for g in p.gpus), 6)) for p in self.places]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "level": self.level,
            "speed": self.speed,
            "reserved": self.reserved,
            "batch": self.batch,
            "places": [
                {
                    "node": p.node,
                    "cpus": p.cpus,
                    "memory_bytes": p.memory_bytes,
                    "gpus": [[g.uuid, g.fraction, g.mechanism, g.slice, g.instance, g.limit] for g in p.gpus],
                }
                for p in self.places
            ],
        }


def assignment_from_dict(data: Mapping[str, Any]) -> Assignment:
    """Rebuild the assignment from the output of `to_dict`."""
    places = tuple(
        Place(p["node"], tuple(GpuShare(*gpu) for gpu in p["gpus"]), p["cpus"], p["memory_bytes"])
        for p in data["places"]
    )
    return Assignment(places, data["level"], data["speed"], data.get("reserved", False), data.get("batch", 0))


@dataclass(slots=True)
class Attempt:
    """One run of a job's processes, on all of its nodes. Times are seconds of the fleet's clock (controller/clock.py).
    """

    n: int
    assignment: Assignment
    phase: str = STARTING
    created_s: float = 0.0
    started_s: float | None = None
    stop_s: float | None = None  #: time at which a stop was requested; None: not requested
    stop_why: str = ""  #: why a stop was requested: preempt, move, cancel, gang, lost or shutdown
    counted_s: float = 0.0  #: the attempt's run time up to this moment is included in the job's attained_s
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)  #: node -> exit of the attempt's processes there
    ended_s: float | None = None
    up: set[str] = field(default_factory=set)  #: nodes on which the attempt's processes have started
    progress: dict[str, Any] | None = None
    port: int = 0
    off: bool = False  #: true: the attempt holds no GPU, because it is parked or was parked when it was asked to stop
    off_on: set[str] = field(default_factory=set)  #: nodes on which the attempt is parked

    @property
    def nodes(self) -> list[str]:
        """The nodes of an attempt to run a job. The ranks of a gang find each other through the first one."""
        return [p.node for p in self.assignment.places]


@dataclass(slots=True)
class Job:
    """One submitted job. `done`: fraction of its work; `attained_s`: seconds run; `failures`: attempts that failed."""

    row: int
    id: str
    spec: JobSpec
    arrival_s: float
    state: str = WAITING
    n: int = 0  #: number of attempts to run the job so far
    failures: int = 0
    losses: int = 0
    done: float = 0.0
    attained_s: float = 0.0
    last_run_s: float = 0.0
    first_start_s: float | None = None
    finished_s: float | None = None
    arrived: bool = False
    cancel: bool = False
    told: int = -1  #: the reason for waiting that was recorded last; -1: none since the job last ran
    exit: dict[str, Any] | None = None
    attempt: Attempt | None = None
    target: Assignment | None = None  #: assignment that the last plan gives the job
    target_reason: int = int(Reason.IN_ORDER)

    @property
    def isolated_s(self) -> float | None:
        """Run time of the job alone, in seconds, as its user stated it."""
        return self.spec.duration_s

    def grace_s(self, default_s: float) -> float:
        """Seconds from a request to stop to SIGKILL. `default_s`: the fleet's, for a job that states none."""
        return default_s if self.spec.grace_s is None else self.spec.grace_s

    def attempt_id(self) -> str:
        """Name of the job's current attempt. Names are never reused."""
        assert self.attempt is not None
        return f"{self.id}.{self.attempt.n}"
