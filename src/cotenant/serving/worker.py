"""The interface of workers. A worker is a process that has a share of one GPU (a gpulet) and runs the models that the
plan places on this share.

This module separates the gateway's live state (pool.py) from the processes that run batches: on this machine
(workers/local.py), or on the nodes of a Ray cluster (workers/on_ray.py). All data exchanged through this interface is
plain data and can be pickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cotenant.core.errors import WorkError
from cotenant.serving.protocol.tensors import ModelInfo, Tensor


@dataclass(frozen=True)
class ModelSpec:
    """One model of a worker. `batch`: its largest batch; `path`: the version's folder, None if nothing is on disk;
    `config`: the repository's configuration of the model; not `latency_sensitive`: best-effort.
    """

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
    """Description of a worker: its models and its share of a GPU. `partition`: the share's name; `fraction`: its size;
    `start`: fraction of the SMs with which the worker starts, if the mechanism allows a choice.
    """

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
    """A batch for a worker: `units` are items, each with its input tensors in the model's order and with the shape of
    one item. `expected_ms`: planned duration. A timed model, which does not compute, sleeps for exactly that long.
    """

    number: int
    service: str
    units: list[list[Tensor]]
    expected_ms: float = 0.0
    submitted_s: float = 0.0


@dataclass(slots=True)
class Result:
    """Result of a job: for each unit its output tensors, or one sentence that says why it has none."""

    executed_ms: float
    answers: list[list[Tensor] | str]


class LoadError(Exception):
    """A worker could not be created: `service` is the one whose model was at fault, "" if none was."""

    def __init__(self, service: str, why: str) -> None:
        super().__init__(why)
        self.service, self.why = service, why


class UnavailableError(WorkError):
    """A worker cannot be created now but perhaps later, and no model is at fault: for example, the agent does not
    answer, or a node is lost.
    """


class WorkerListener(Protocol):
    """Receives workers' events, in the event loop's thread."""

    def finished(self, worker: Worker, job: Job, result: Result) -> None:
        """Called when a job has an answer."""

    def died(self, worker: Worker, why: str) -> None:
        """Called when the worker has ended. The job that it was running gets no answer."""


class Worker(Protocol):
    """A worker: one share of a GPU with its models."""

    spec: WorkerSpec
    pid: int | None

    async def start(self) -> dict[str, ModelInfo]:
        """Start, load the models and warm up. Returns facts about the models by service. LoadError on failure."""

    def submit(self, job: Job) -> None:
        """Run a job; returns at once. The worker has at most one job at a time."""

    async def stop(self, grace_s: float) -> None:
        """End the worker after its running job; kill it after `grace_s`."""

    def kill(self) -> None:
        """End the worker at once. The listener's `died` is called."""


class WorkerFactory(Protocol):
    """Creates workers."""

    def gpus(self) -> Sequence[int] | None:
        """The GPUs that can be used now, by their numbers in the plan; None: all."""

    def create(self, spec: WorkerSpec, listener: WorkerListener) -> Worker:
        """Create a worker, which is not started yet."""

    async def close(self) -> None:
        """Release what the workers shared. Called after all workers have been stopped."""
