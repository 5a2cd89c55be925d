"""What a worker is: one process (or actor) with one share of one GPU, running the models of one gpulet.

This module is the boundary between the gateway's live state (pool.py) and whatever runs batches: processes on this
machine (workers/local.py), or actors elsewhere. Everything that crosses it is plain data and can be pickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cotenant.core.errors import WorkError
from cotenant.serving.protocol.tensors import ModelInfo, Tensor


@dataclass(frozen=True)
class ModelSpec:
    """One model of a worker. `batch` is the largest batch it will get; `path` the version's folder, None where nothing
    is on disk; `config` what the repository says of the model; not `latency_sensitive`: best-effort."""

    service: str
    model: str
    backend: str
    path: str | None
    version: str
    batch: int
    config: Mapping[str, Any] = field(default_factory=dict)
    latency_sensitive: bool = True


@dataclass(frozen=True)
class WorkerSpec:
    """A worker to be made: a share (`fraction` of a GPU, called `partition`; `start`: the fraction of the SMs at which
    it begins, where the mechanism can choose) and its models."""

    name: str
    gpu: int
    gpu_model: str
    partition: str
    fraction: float
    mechanism: str
    models: tuple[ModelSpec, ...]
    start: float = 0.0


@dataclass(slots=True)
class Job:
    """A batch for a worker: `units` are items, each its input tensors in the order of the model's inputs and with the
    shape of one item. `expected_ms` is what the plan says it takes (a timed model takes just that)."""

    number: int
    service: str
    units: list[list[Tensor]]
    expected_ms: float = 0.0
    submitted_s: float = 0.0


@dataclass(slots=True)
class Result:
    """What became of a job: per unit its output tensors, or one sentence saying why there are none."""

    executed_ms: float
    answers: list[list[Tensor] | str]


class LoadError(Exception):
    """A worker could not be made: `service` is the one whose model was to blame, "" where none was."""

    def __init__(self, service: str, why: str) -> None:
        super().__init__(why)
        self.service, self.why = service, why


class UnavailableError(WorkError):
    """A worker cannot be made now, perhaps later, and no model is to blame: who gives out GPUs does not answer."""


class WorkerListener(Protocol):
    """Who is told what workers do; called on the event loop's thread."""

    def finished(self, worker: Worker, job: Job, result: Result) -> None:
        """A job has an answer."""

    def died(self, worker: Worker, why: str) -> None:
        """The worker is gone; the job it had gets no answer."""


class Worker(Protocol):
    """One share with its models."""

    spec: WorkerSpec
    pid: int | None

    async def start(self) -> dict[str, ModelInfo]:
        """Boot, load, warm up: what was found, by service. LoadError when it cannot be done."""

    def submit(self, job: Job) -> None:
        """Run a job; returns at once. The worker has at most one job at a time."""

    async def stop(self, grace_s: float) -> None:
        """End after the job that runs, killed when that takes longer than `grace_s`."""

    def kill(self) -> None:
        """End now; the listener hears that it died."""


class WorkerFactory(Protocol):
    """Makes workers."""

    def gpus(self) -> Sequence[int] | None:
        """The plan's GPU numbers that can be used now, None for all."""

    def create(self, spec: WorkerSpec, listener: WorkerListener) -> Worker:
        """A worker that has not been started."""

    async def close(self) -> None:
        """Let go of what workers shared. All of them have been stopped."""
