"""Types of serving as plain data: services with SLOs, gpulets (parts of GPUs), and the plan that divides GPUs into
gpulets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cotenant.core.errors import InputError

MAX_BATCH = 1024
MAX_GPUS = 1_000_000


MOST_MODELS = 128  # largest number of models on one gpulet (part of a GPU)
MOST_NAMED = 10  # `ServingPlan.unserved` lists the names of at most this many services


@dataclass(frozen=True)
class Service:
    """A model that answers requests at a rate under an SLO.

    `rate_rps` is the rate to plan for, `slo_ms` the latency limit from arrival to answer. Services of higher `priority`
    are planned first if not all fit. `memory_bytes` overrides the profile's figure; `input_bytes`: size of one
    request's input.
    """

    name: str
    model: str
    rate_rps: float
    slo_ms: float
    priority: int = 0
    latency_sensitive: bool = True
    memory_bytes: int | None = None
    input_bytes: float = 0.0
    max_queue: int = 1000

    def __post_init__(self) -> None:
        _check_positive("service", self)


@dataclass(frozen=True)
class Seat:
    """Placement of a service on a gpulet (a part of a GPU): its batch size per cycle and the rate assigned to it."""

    service: str
    model: str
    batch: int
    rate_rps: float


@dataclass(frozen=True)
class Gpulet:
    """A gpulet: a partition of one GPU. The services placed on it (`seats`) each run one batch per cycle of `duty_ms`.
    `slot` distinguishes gpulets of equal size. `instance`: first memory slot of the MIG instance that the gpulet is, or
    is a part of; 0 without MIG."""

    gpu: int
    gpu_model: str
    partition: str
    percent: float
    slot: int
    duty_ms: float
    seats: tuple[Seat, ...]
    instance: int = 0

    @property
    def name(self) -> str:
        return f"{self.gpu}/{self.partition}/{self.slot}"

    def capacity_rps(self, seat: Seat) -> float:
        """Return the requests per second of a service's placement on this gpulet: one batch per cycle."""
        return seat.batch * 1000.0 / self.duty_ms


@dataclass(frozen=True)
class LeftOut:
    """A service that the plan does not serve at its full rate: `missing_rps` requests per second have no place, for the
    reason `reason`."""

    service: str
    missing_rps: float
    reason: str


@dataclass(frozen=True)
class ServingPlan:
    """The complete result of a serving planner: which services run on which gpulets (parts) of which GPUs. `bound`:
    proven upper bound on the common factor by which all rates could grow on these GPUs (below 1: proven infeasible),
    None if the planner proves nothing.
    """

    planner: str
    gpus: int
    gpulets: tuple[Gpulet, ...]
    left_out: tuple[LeftOut, ...] = ()
    proven_infeasible: bool = False
    bound: float | None = None
    notes: tuple[str, ...] = ()
    rates_rps: Mapping[str, float] = field(default_factory=dict)

    @property
    def feasible(self) -> bool:
        return not self.left_out

    @property
    def unserved(self) -> str | None:
        """Return a sentence that names the services for which the plan serves only a part of the requests or none; None
        if the plan serves all requests.
        """
        if not self.left_out:
            return None
        names = [x.service for x in self.left_out]
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        return (
            f"the plan does not serve all requests of {len(names)} of {len(self.rates_rps)} services: "
            f"{', '.join(names[:MOST_NAMED])}{more}"
        )

    @property
    def gpus_used(self) -> int:
        return len({g.gpu for g in self.gpulets})

    def capacities(self) -> dict[str, float]:
        """Return the requests per second that the plan provides for, by service."""
        total: dict[str, float] = dict.fromkeys(self.rates_rps, 0.0)
        for let in self.gpulets:
            for seat in let.seats:
                total[seat.service] = total.get(seat.service, 0.0) + let.capacity_rps(seat)
        return total

    def headroom(self) -> dict[str, float]:
        """Return for each service the capacity divided by the planned rate."""
        return {name: cap / self.rates_rps[name] for name, cap in self.capacities().items() if name in self.rates_rps}

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data for JSON; `from_dict` gives the same plan back."""
        return {
            "planner": self.planner,
            "gpus": self.gpus,
            "gpus_used": self.gpus_used,
            "feasible": self.feasible,
            "proven_infeasible": self.proven_infeasible,
            "bound": self.bound,
            "notes": list(self.notes),
            "services": {
                name: {"rate_rps": rate, "capacity_rps": cap, "headroom": cap / rate}
                for (name, rate), cap in zip(self.rates_rps.items(), self._ordered_capacities(), strict=True)
            },
            "left_out": [vars(x) for x in self.left_out],
            "gpulets": [
                {
                    "gpu": g.gpu, "gpu_model": g.gpu_model, "partition": g.partition, "percent": g.percent,
                    "slot": g.slot, "instance": g.instance, "duty_ms": g.duty_ms, "seats": [vars(s) for s in g.seats],
                }
                for g in self.gpulets
            ],
        }  # fmt: skip

    def _ordered_capacities(self) -> Iterable[float]:
        caps = self.capacities()
        return (caps[name] for name in self.rates_rps)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], file: str = "plan") -> ServingPlan:
        """Rebuild a serving plan from `to_dict`; InputError names what is missing or wrong."""
        from pydantic import TypeAdapter, ValidationError

        from cotenant.core.checked import worded

        try:
            plan = cls(
                planner=str(data["planner"]),
                gpus=int(data["gpus"]),
                gpulets=TypeAdapter(tuple[Gpulet, ...]).validate_python(data["gpulets"]),
                left_out=TypeAdapter(tuple[LeftOut, ...]).validate_python(data.get("left_out", ())),
                proven_infeasible=bool(data.get("proven_infeasible", False)),
                bound=data.get("bound"),
                notes=tuple(str(x) for x in data.get("notes", ())),
                rates_rps={str(name): float(s["rate_rps"]) for name, s in data["services"].items()},
            )
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InputError(f"not a plan: {worded(first)}", file=file, field=f"gpulets.{where}") from None
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            missing = f"{error} is missing" if isinstance(error, KeyError) else "a value has the wrong type"
            raise InputError(f"not a plan that `cotenant plan --json` wrote: {missing}", file=file) from None
        for i, let in enumerate(plan.gpulets):
            if not (0 <= let.gpu < MAX_GPUS and 0 < let.duty_ms < math.inf and let.seats):
                raise InputError("needs a GPU, a duty cycle above 0 and seats", file=file, field=f"gpulets.{i}")
            if any(not (1 <= seat.batch <= MAX_BATCH and 0 <= seat.rate_rps < math.inf) for seat in let.seats):
                raise InputError(
                    f"batches must be 1 to {MAX_BATCH} and rates at least 0", file=file, field=f"gpulets.{i}"
                )
        return plan


@dataclass(frozen=True)
class Application:
    """A graph of models that one request passes through; `graph` maps each stage to its successors.

    A stage starts when all its predecessors are done. `slo_ms` is the latency limit of the whole request, from its
    arrival to the end of the last stage.
    """

    name: str
    graph: Mapping[str, tuple[str, ...]]
    rate_rps: float
    slo_ms: float
    priority: int = 0

    def __post_init__(self) -> None:
        _check_positive("application", self)
        if not self.stages:
            raise InputError(f"application {self.name} has no stages", field="graph")
        self.order()

    @property
    def stages(self) -> tuple[str, ...]:
        children = (c for cs in self.graph.values() for c in cs)
        return tuple(dict.fromkeys([*self.graph, *children]))

    def parents(self, stage: str) -> list[str]:
        """Return the stages of the application after which this stage starts."""
        return [s for s, children in self.graph.items() if stage in children]

    def order(self) -> list[str]:
        """Return the application's stages in topological order; InputError if the graph has a cycle."""
        done: list[str] = []
        rest = list(self.stages)
        while rest:
            ready = [s for s in rest if all(p in done for p in self.parents(s))]
            if not ready:
                raise InputError(
                    f"application {self.name}: the graph has a cycle among {', '.join(sorted(rest))}", field="graph"
                )
            done += ready
            rest = [s for s in rest if s not in ready]
        return done


def _check_positive(kind: str, one: Service | Application) -> None:
    for name in ("rate_rps", "slo_ms"):
        value = getattr(one, name)
        if not math.isfinite(value) or value <= 0:
            raise InputError(f"{kind} {one.name}: {value:g} is not a positive finite number", field=name)


# the applications of the gpulet paper: `game` recognizes digits and an image; `traffic` detects objects and then
# classifies them
APPLICATIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "game": {**{f"lenet{i}": () for i in range(1, 7)}, "resnet50": ()},
    "traffic": {"ssd-mobilenetv1": ("googlenet", "vgg16")},
}
