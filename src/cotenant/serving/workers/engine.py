"""The core of a worker: loads models and runs batches. The worker process (main.py) communicates with the gateway."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.serving.backends.base import Backend, Share, open_backend
from cotenant.serving.protocol.tensors import ModelInfo, Tensor, from_array, to_array
from cotenant.serving.worker import Job, LoadError, Result, WorkerSpec
from cotenant.serving.workers.configured import Shapes, labels, shaped

MOST_ITEMS = 1 << 30
MOST_SAID = 500  # a model's error is cut to this many characters before it is sent to the client


class Engine:
    """Loads the models that a worker's spec names, and runs batches on them."""

    def __init__(self, spec: WorkerSpec, cores: tuple[int, ...] = ()) -> None:
        self.spec = spec
        capabilities = mechanisms.find(spec.mechanism).capabilities
        self.share = Share(spec.fraction, cores, spec.start, capabilities.needs_gpu, capabilities.worker_resizes)
        self._models: dict[str, Backend] = {}
        self._most: dict[str, int] = {}  # service -> largest batch of its model
        self._shapes: dict[str, Shapes] = {}

    def load(self, loading: Callable[[str], None] = lambda service: None) -> dict[str, ModelInfo]:
        """Load every model, calling `loading` before each; LoadError says which one failed and why."""
        found = {}
        for model in self.spec.models:
            loading(model.service)
            try:
                opened = self._models[model.service] = open_backend(model, self.share)
                configured, self._shapes[model.service] = shaped(model.config, opened.info)
                info = replace(configured, labels=labels(model))
            except Exception as error:
                raise LoadError(model.service, said(error)) from error
            found[model.service] = info
            self._most[model.service] = int(model.config.get("max_batch_size", 0)) or MOST_ITEMS
        return found

    def run_stacked(
        self, service: str, inputs: list[np.ndarray], count: int, submitted_s: float, expected_ms: float
    ) -> list[np.ndarray]:
        """Run a batch of items of equal shape. The first dimension of all arrays, in and out, is the batch."""
        model = self._models[service]
        found = self._run(service, inputs, count)
        model.pace(count, submitted_s, expected_ms)
        return found

    def _run(self, service: str, inputs: list[np.ndarray], count: int) -> list[np.ndarray]:
        model, most, shapes = self._models[service], self._most[service], self._shapes[service]
        if shapes.any:
            return shapes.outputs(self._run_own(model, most, shapes.inputs(inputs, count), count), count)
        return self._run_own(model, most, inputs, count)

    def _run_own(self, model: Backend, most: int, inputs: list[np.ndarray], count: int) -> list[np.ndarray]:
        """Run a batch with the shapes that the model itself has."""
        if model.info.batchable:
            # a plan may use a larger batch than the model's configuration allows, because plans are based on profiles
            if count > most:
                parts = [
                    self._run_own(model, most, [x[at : at + most] for x in inputs], min(most, count - at))
                    for at in range(0, count, most)
                ]
                return [np.concatenate(column) for column in zip(*parts, strict=True)]
            found = model.run(inputs, count)
            if any(len(x) != count for x in found):
                raise ValueError(f"the model answered a batch of {count} with {[len(x) for x in found]} items")
            return found
        each = [model.run([x[i] for x in inputs], 1) for i in range(count)]
        return [np.stack([np.asarray(one[k]) for one in each]) for k in range(len(model.info.outputs))]

    def resize(self, fraction: float) -> bool:
        """Use another share of the GPU from the next batch on. Returns False if a model needs a new process for that.
        """
        return all(model.resize(fraction) for model in self._models.values())

    def run(self, job: Job) -> Result:
        """Run a batch of items of any shapes. An item that fails gets an error, and the items that do not fail get
        their answers.
        """
        began = time.monotonic()
        model = self._models[job.service]
        answers: list[list[Tensor] | str] = [""] * len(job.units)
        for rows in _alike(job.units):
            self._group(job.service, job.units, rows, answers)
        try:
            model.pace(len(job.units), job.submitted_s, job.expected_ms)
        except Exception as error:
            answers = [said(error)] * len(job.units)
        return Result((time.monotonic() - began) * 1e3, answers)

    def _group(
        self, service: str, units: Sequence[list[Tensor]], rows: list[int], answers: list[list[Tensor] | str]
    ) -> None:
        """Run items of equal shape together. If that fails, run each item alone, so that one bad item does not affect
        the others.
        """
        inputs = [np.stack([to_array(units[i][k]) for i in rows]) for k in range(len(units[rows[0]]))]
        try:
            found = self._run(service, inputs, len(rows))
            specs = self._models[service].info.outputs
            for at, i in enumerate(rows):
                answers[i] = [from_array(s.name, x[at], s.datatype) for s, x in zip(specs, found, strict=True)]
        except Exception as error:
            if len(rows) == 1:
                answers[rows[0]] = said(error)
                return
            for i in rows:
                self._group(service, units, [i], answers)

    def lost(self) -> bool:
        """Whether the device has failed permanently for this process, for example because the MPS server died."""
        return any(model.lost() for model in self._models.values())

    def close(self) -> None:
        """Free the resources of all models."""
        for model in self._models.values():
            model.close()
        self._models.clear()


def _alike(units: Sequence[list[Tensor]]) -> list[list[int]]:
    groups: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for i, unit in enumerate(units):
        groups.setdefault(tuple(tensor.shape for tensor in unit), []).append(i)
    return list(groups.values())


def said(error: BaseException) -> str:
    """An exception as one sentence of bounded length."""
    if isinstance(error, MemoryError):
        return f"out of memory: {error}" if str(error) else "out of memory"
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:MOST_SAID]
