"""Runs one model in a worker process, for `cotenant infer` and profiles, with the same worker, backend and share as in
the server."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from cotenant.core.errors import InputError, WorkError
from cotenant.serving.config.backends import AUTO, files
from cotenant.serving.config.server import ModelEntry
from cotenant.serving.protocol.items import check_inputs, split
from cotenant.serving.protocol.oip import WireError, decode_request
from cotenant.serving.protocol.tensors import FREE_SIZE, ModelInfo, Tensor, TensorError, random_data
from cotenant.serving.worker import Job, LoadError, ModelSpec, Result, Worker, WorkerFactory, WorkerSpec
from cotenant.serving.workers.local import LocalWorkers
from cotenant.serving.workers.repository import Found, find


@dataclass(frozen=True)
class Sample:
    """Durations of one batch in ms: inside the worker, and from submission to answer."""

    executed_ms: float
    total_ms: float


def find_model(path: str, backend: str = AUTO) -> tuple[str, Found]:
    """Name of a model folder, and the model to load from it. InputError if it holds none."""
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(
            f"is not the folder NAME of a model NAME/VERSION/FILE, where FILE is one of {files()}",
            file=path,
        )
    name = folder.resolve().name
    return name, find(ModelEntry(name, name, backend, folder))


def random_unit(info: ModelInfo, seed: int, sizes: dict[str, tuple[int, ...]]) -> list[Tensor]:
    """One item with random values for a model's inputs. `sizes`: sizes for dynamic dimensions."""
    rng = np.random.default_rng(seed)
    unit = []
    for spec in info.inputs:
        shape = sizes.get(spec.name) or tuple(FREE_SIZE if n < 0 else n for n in spec.shape)
        if len(shape) != len(spec.shape):
            what = f"input {spec.name!r} has {len(spec.shape)} sizes; {len(shape)} were given"
            raise InputError(what, field="shape")
        count = int(np.prod(shape))
        unit.append(Tensor(spec.name, spec.datatype, shape, random_data(spec.datatype, count, rng)))
    return unit


def read_sample(path: Path, info: ModelInfo) -> list[list[Tensor]]:
    """The items of an inference request in JSON. InputError if it does not fit the model."""
    try:
        request = decode_request("sample", "", path.read_bytes(), None)
        inputs, rows = check_inputs(request.inputs, info)
    except (OSError, WireError, TensorError) as error:
        raise InputError(f"is not a request that the model accepts: {error}", file=path) from None
    return split(inputs, rows, info.batchable)


class OneModel:
    """Async context manager that runs one worker, which has one batch at a time."""

    def __init__(
        self, factory: WorkerFactory, name: str, found: Found, *, fraction: float, partition: str, mechanism: str,
        batch: int, gpu_model: str = "", seed: int = 0, sizes: dict[str, tuple[int, ...]] | None = None,
        sample: Path | None = None,
    ) -> None:  # fmt: skip
        model = ModelSpec(name, name, found.backend, found.path, found.version, batch, found.config)
        self.name = name
        self.spec = WorkerSpec(name, 0, gpu_model, partition, fraction, mechanism, (model,))
        self.worker: Worker = factory.create(self.spec, self)
        self._seed, self._sizes, self._sample = seed, sizes or {}, sample
        self._waiting: asyncio.Future[Result] | None = None
        self._ended = ""  # why the worker has ended; empty while it runs
        self._number = 0
        self.load_s = 0.0

    async def __aenter__(self) -> OneModel:
        began = time.monotonic()
        try:
            self.info = (await self.worker.start())[self.name]
        except LoadError as error:
            raise WorkError(f"{self.name} cannot be loaded: {error.why}") from None
        self.load_s = time.monotonic() - began
        self.units = (
            [random_unit(self.info, self._seed, self._sizes)] if self._sample is None
            else read_sample(self._sample, self.info)
        )  # fmt: skip
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.worker.stop(2.0)

    def finished(self, worker: Worker, job: Job, result: Result) -> None:
        """See WorkerListener."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(result)

    def died(self, worker: Worker, why: str) -> None:
        """See WorkerListener."""
        self._ended = why
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(WorkError(f"the worker of {self.name} {why}"))

    async def run(self, batch: int) -> Sample:
        """Run a batch. Raises WorkError if the model fails."""
        # if the worker ended between two batches, `died` has been called already and would not end this batch's wait
        if self._ended:
            raise WorkError(f"the worker of {self.name} {self._ended}")
        self._number += 1
        self._waiting = asyncio.get_running_loop().create_future()
        began = time.monotonic()
        units = [self.units[i % len(self.units)] for i in range(batch)]
        self.worker.submit(Job(self._number, self.name, units))
        result = await self._waiting
        total = (time.monotonic() - began) * 1e3
        failed = next((x for x in result.answers if isinstance(x, str)), None)
        if failed is not None:
            raise WorkError(f"{self.name} failed on a batch of {batch}: {failed}")
        return Sample(result.executed_ms, total)

    def resident_bytes(self) -> int:
        """Return the resident memory of the worker's process in bytes."""
        if self.worker.pid is None:
            return 0
        with open(f"/proc/{self.worker.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def local_factory(mechanism: str) -> LocalWorkers:
    """A factory of workers on this machine, whose CPU cores count as one GPU."""
    return LocalWorkers(mechanism, 1)
