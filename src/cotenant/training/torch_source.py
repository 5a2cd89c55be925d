"""Source of batches from a PyTorch DataLoader. For a dataset whose samples are read by index, it makes a new DataLoader
that can begin an epoch at any batch, with the dataset, sampler and settings of the user's DataLoader.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

from cotenant.core.extras import needs
from cotenant.training.randomness import Stream, apart, derive
from cotenant.training.sources import IterableSource, Source, tell_memory

with needs("torch"):
    from torch import Generator
    from torch.utils.data import DataLoader, IterableDataset


class _Numbered(list[Any]):
    """The indices of a batch's samples, with the number of the batch in the epoch."""

    number: int


class _Seeded:
    """A dataset that returns whole batches of another dataset. Random choices in the samples, and in combining them,
    depend only on seed, epoch and batch number.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, epoch: int) -> None:
        self._dataset, self._collate, self._seed, self._epoch = loader.dataset, loader.collate_fn, seed, epoch

    def __getitems__(self, batch: _Numbered) -> Any:
        with apart(derive(self._seed, self._epoch, batch.number)):
            many = getattr(self._dataset, "__getitems__", None)
            return self._collate(many(list(batch)) if many else [self._dataset[index] for index in batch])

    def __getitem__(self, one: _Numbered) -> Any:
        # the loader does not form batches (batch_size=None), so `one` has a single index, which the loader's sampler
        # drew
        with apart(derive(self._seed, self._epoch, one.number)):
            return self._collate(self._dataset[one[0]])


def _as_it_is(batch: Any) -> Any:
    return batch


class _Order:
    """The batches of a sampler from number `first` on, drawn on demand with a separate stream of random numbers."""

    def __init__(self, sampler: Any, seed: int, epoch: int, first: int, *, batched: bool) -> None:
        self._sampler, self._first, self._batched = sampler, first, batched
        self._stream = Stream(derive(seed, epoch, "order"))
        parts: tuple[Any, ...] = (sampler, getattr(sampler, "sampler", None))
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
            if isinstance(getattr(part, "generator", None), Generator):
                part.generator.manual_seed(derive(seed, epoch, "generator"))

    def __iter__(self) -> Iterator[_Numbered]:
        with self._stream:
            iterator = iter(self._sampler)
        number = 0
        while True:
            with self._stream:
                try:
                    drawn = next(iterator)
                except StopIteration:
                    return
            if number >= self._first:
                batch = _Numbered(drawn if self._batched else [drawn])
                batch.number = number
                yield batch
            number += 1


class _Worker:
    """Initializes a worker process of a DataLoader: ignores SIGTERM, and then calls the user's own worker_init_fn."""

    def __init__(self, users: Callable[[int], None] | None) -> None:
        self._users = users

    def __call__(self, worker: int) -> None:
        # to stop a job, the process that started it sends SIGTERM to the job's whole process group, which includes the
        # workers; they ignore it and end when the loop ends
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self._users is not None:
            self._users(worker)


class TorchSource(Source):
    """Source of batches from a DataLoader with a map-style dataset, whose samples are read by index."""

    def __init__(self, loader: DataLoader[Any], most_workers: int) -> None:
        self._loader, self._most_workers = loader, most_workers
        self._batched = loader.batch_sampler is not None

    def batches(self, seed: int, epoch: int, first: int, cpus: float | None) -> Iterator[Any]:
        own, workers = self._loader, self.workers(cpus)
        order = _Order(own.batch_sampler if self._batched else own.sampler, seed, epoch, first, batched=self._batched)
        sampling: dict[str, Any] = {"batch_sampler": order} if self._batched else {"batch_size": None, "sampler": order}
        if workers:
            sampling |= {
                "prefetch_factor": own.prefetch_factor,
                "multiprocessing_context": own.multiprocessing_context,
                "timeout": own.timeout,
            }
        resumed: DataLoader[Any] = DataLoader(
            _Seeded(own, seed, epoch),
            num_workers=workers,
            collate_fn=_as_it_is,
            pin_memory=own.pin_memory,
            worker_init_fn=_Worker(own.worker_init_fn) if workers else None,
            generator=Generator().manual_seed(derive(seed, epoch, first, "workers")),
            **sampling,
        )
        return iter(resumed)

    def length(self) -> int | None:
        return _length(self._loader)

    def workers(self, cpus: float | None) -> int:
        """Return the number of worker processes of the loader. If the loader has workers and the job's cores are known,
        it is the number of these cores, but at most `most_workers`; otherwise the loader's own number.
        """
        stated = self._loader.num_workers
        return stated if stated == 0 or cpus is None else max(1, min(int(cpus), self._most_workers))

    def samples_per_batch(self) -> int | None:
        return self._loader.batch_size or getattr(self._loader.batch_sampler, "batch_size", None)

    def set_memory(self, memory_bytes: int) -> None:
        tell_memory(self._loader.dataset, memory_bytes)


def torch_source(loader: DataLoader[Any], most_workers: int) -> Source:
    """Return the source of batches for a DataLoader. A DataLoader of an IterableDataset, whose samples cannot be read
    by index, keeps its number of workers; to begin in the middle of an epoch, it draws and drops the earlier batches.
    """
    if isinstance(loader.dataset, IterableDataset):
        return IterableSource(lambda epoch: loader, _length(loader), loader)
    return TorchSource(loader, most_workers)


def _length(loader: DataLoader[Any]) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
