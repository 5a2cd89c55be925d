"""Cost of a model's batch on a partition of a GPU: latency, interference between neighbours, memory. A part of a GPU
that serves one or several models is also called a *gpulet*.

L(b, p) is the profiled latency of a batch of b requests on a partition p, linear between the profiled batches. Beside
neighbours with partitions p', the batch takes longer by the factor alpha:

    effective = (L(b, p) * alpha + overhead(b)) * margin
    alpha     = max(1, c0 + p * (c1 * l2_self + c3 * dram_self) + sum over neighbours of p' * (c2 * l2' + c4 * dram'))

overhead(b) is the time to build the batch, and margin a safety factor of the profile. In alpha, p and p' stand for
fractions of the GPU, or of the MIG instance that holds both: instances do not slow each other down. `l2` and `dram` are
the utilisations of cache and device memory that the model reaches alone on the whole GPU. For a neighbour with several
models, the model counts that slows others down most. Linear interference model: Choi et al., "Serving Heterogeneous
Machine Learning Models on Multi-GPU Servers with Spatio-Temporal Sharing", USENIX ATC 2022. The terms of several
neighbours are added.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cotenant.core.errors import InputError, nearest

Points = tuple[tuple[int, float], ...]  # pairs (batch size, value), ordered by batch size


@dataclass(frozen=True, order=True)
class Partition:
    """A size of gpulet: the `fraction` of the GPU's SMs that it has, and its `label` in files.

    Under MIG a gpulet is an instance, or a part of one: `instance` is the kind of that instance, and `slots` its number
    of memory slots ("" and 0 without MIG). `share`: the gpulet's fraction of the instance, or of the GPU. `processes`:
    number of gpulets of this size into which an instance is divided, or 1. If it is above 1, each gpulet is an MPS
    process, and all are of one service, because the latencies were measured with this number of processes of one model.
    """

    fraction: float
    label: str
    slots: int = 0
    instance: str = ""
    share: float = 0.0
    processes: int = 1

    def __post_init__(self) -> None:
        if self.slots and not self.instance:
            object.__setattr__(self, "instance", self.label)
        if not self.share:
            object.__setattr__(self, "share", 1.0 if self.slots else self.fraction)

    def cut(self, label: str, share: float, processes: int = 1) -> Partition:
        """Return the size of a gpulet that is a part of this partition."""
        return replace(self, label=label, fraction=self.fraction * share, share=self.share * share, processes=processes)

    @property
    def percent(self) -> float:
        return round(self.fraction * 100, 4)


@dataclass(frozen=True)
class Interference:
    """Coefficients of alpha, the slowdown by neighbours; `constant` is c0. `BLIND` predicts no interference at all."""

    l2_self: float = 0.0
    l2_other: float = 0.0
    dram_self: float = 0.0
    dram_other: float = 0.0
    constant: float = 1.0

    def own(self, l2: float, dram: float) -> float:
        """Return the part of the slowdown `alpha` from a model's own utilisations, to be multiplied by the fraction of
        the GPU that the model has.
        """
        return self.l2_self * l2 + self.dram_self * dram

    def other(self, l2: float, dram: float) -> float:
        """Return the part of the slowdown `alpha` from a neighbour's utilisations, to be multiplied by the neighbour's
        fraction of the GPU.
        """
        return self.l2_other * l2 + self.dram_other * dram


BLIND = Interference()


@dataclass(frozen=True)
class ModelProfile:
    """The profile of one model on one GPU type: memory and, by batch, latency per partition label, overhead and
    utilisations.
    """

    name: str
    memory_bytes: int
    latency_ms: Mapping[str, Points]
    overhead_ms: Points = ()
    l2: Points = ()
    dram: Points = ()


def interpolate(points: Points, batch: int, what: str) -> float:
    """Return the value at a batch size, interpolated linearly between the two nearest profiled sizes. Raises InputError
    outside the profiled range.
    """
    if not points:
        raise InputError(f"{what} is not in the profile")
    batches = [b for b, _ in points]
    i = bisect.bisect_left(batches, batch)
    if i < len(batches) and batches[i] == batch:
        return points[i][1]
    if i in (0, len(batches)):
        raise InputError(f"{what} at batch {batch} is outside the profiled batches {batches[0]} to {batches[-1]}")
    (b0, v0), (b1, v1) = points[i - 1], points[i]
    return v0 + (v1 - v0) * (batch - b0) / (b1 - b0)


@dataclass(frozen=True)
class ServingProfile:
    """Profile of one GPU type for serving.

    `usable` is the fraction of `memory_bytes` for plans, `per_gpulet_bytes` the memory of each gpulet before any
    model (context, framework), `max_gpulets` the maximum per GPU, `margin` the factor on every latency.
    `network_bps` limits the input traffic of one GPU (bits per second), None: no limit.
    """

    gpu: str
    source: str
    memory_bytes: int
    partitions: tuple[Partition, ...]
    models: Mapping[str, ModelProfile]
    interference: Interference = BLIND
    usable: float = 1.0
    per_gpulet_bytes: int = 0
    max_gpulets: int = 2
    margin: float = 1.0
    slots: int = 0
    network_bps: float | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)

    def model(self, name: str) -> ModelProfile:
        """Return the profile of a model, by its name or an alias; InputError lists the known ones."""
        found = self.models.get(name) or self.models.get(self.aliases.get(name, ""))
        if found is None:
            known = ", ".join(sorted(self.models))
            hint = nearest(name, (*self.models, *self.aliases))
            what = f"model {name!r} is absent from the {self.gpu} profile, which has {known}"
            raise InputError(what + (f"; {hint}" if hint else ""))
        return found

    def partition(self, label: str) -> Partition:
        """Return the partition of the GPU with this label; InputError if the profile has none."""
        for partition in self.partitions:
            if partition.label == label:
                return partition
        known = ", ".join(p.label for p in self.partitions)
        raise InputError(f"partition {label} is absent from the {self.gpu} profile, which has {known}")

    def max_batch(self, name: str, label: str) -> int:
        """Return the largest profiled batch of a model on a partition; 0 if the pair is not profiled."""
        points = self.model(name).latency_ms.get(label, ())
        return points[-1][0] if points else 0

    def latency_ms(self, name: str, batch: int, label: str) -> float:
        """Return the milliseconds of one batch alone on a partition, without overhead or margin. InputError if the
        profile has none.
        """
        model = self.model(name)
        return interpolate(model.latency_ms.get(label, ()), batch, f"{self.gpu}: latency of {name} on {label}")

    def overhead_ms(self, name: str, batch: int) -> float:
        """Return the milliseconds of building one batch; 0 if the profile has no overhead for the model."""
        points = self.model(name).overhead_ms
        return interpolate(points, batch, f"{self.gpu}: overhead of {name}") if points else 0.0

    def utilisation(self, name: str, batch: int) -> tuple[float, float]:
        """Return the (L2, DRAM) utilisation, each 0..1, of a model alone on the whole GPU."""
        model = self.model(name)
        if self.interference == BLIND and not model.l2:
            return 0.0, 0.0
        what = f"{self.gpu}: utilisation of {name}"
        return interpolate(model.l2, batch, what), interpolate(model.dram, batch, what)

    def pressure(self, name: str, batch: int, label: str) -> float:
        """Return what a model's batch on a partition adds to the slowdown `alpha` of a neighbour."""
        return self.interference.other(*self.utilisation(name, batch)) * self.partition(label).share

    def alpha(self, name: str, batch: int, label: str, neighbour_pressure: float | None) -> float:
        """Return the slowdown of a model's batch beside neighbours that add `neighbour_pressure` to it in all; 1
        without neighbours (None).
        """
        if neighbour_pressure is None:
            return 1.0
        own = self.interference.own(*self.utilisation(name, batch)) * self.partition(label).share
        return max(1.0, self.interference.constant + own + neighbour_pressure)

    def effective_ms(self, name: str, batch: int, label: str, neighbour_pressure: float | None = None) -> float:
        """Return the milliseconds to plan with for one batch: slowed latency plus overhead, times the margin."""
        slowed = self.latency_ms(name, batch, label) * self.alpha(name, batch, label, neighbour_pressure)
        return (slowed + self.overhead_ms(name, batch)) * self.margin

    def planned_memory_bytes(self) -> float:
        """Return the bytes of one GPU's memory that plans may use."""
        return self.memory_bytes * self.usable
