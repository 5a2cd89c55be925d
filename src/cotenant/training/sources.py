"""Sources of batches. A source can begin an epoch at any batch. From there on it returns the same batches as in a run
that began at the first batch.

All random choices (order, augmentations) depend only on the seed, the epoch and the batch's number. So they need not be
saved, and they do not change with the number of worker processes, which depends on the job's cores.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cotenant.training.randomness import Stream, derive


class Source(ABC):
    """A source of the batches of each epoch of a training job."""

    @abstractmethod
    def batches(self, seed: int, epoch: int, first: int, cpus: float | None) -> Iterator[Any]:
        """Return the batches of an epoch from number `first` on. `cpus`: number of cores of the job; None: not known.
        """

    def length(self) -> int | None:
        """Return the number of batches per epoch; None if it is not known."""
        return None

    def workers(self, cpus: float | None) -> int:
        """Return the number of processes that prepare batches if the job has `cpus` cores."""
        return 0

    def samples_per_batch(self) -> int | None:
        """Return the number of samples in a batch; None if it is not known."""
        return None

    def set_memory(self, memory_bytes: int) -> None:  # noqa: B027 most sources keep no data
        """Pass the job's memory size to code that keeps data in memory."""


class SequenceSource(Source):
    """A sequence of batches, which every epoch iterates over in order."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def batches(self, seed: int, epoch: int, first: int, cpus: float | None) -> Iterator[Any]:
        # reading an item of an object of one of these types draws no random numbers, so items can be skipped
        if isinstance(self._batches, list | tuple | range):
            yield from self._batches[first:]
            return
        for number in range(first, len(self._batches)):
            with Stream(derive(seed, epoch, number)):
                batch = self._batches[number]
            yield batch

    def length(self) -> int | None:
        return len(self._batches)


class IterableSource(Source):
    """An iterable that every epoch iterates over, or a function from the epoch to an iterable. To begin in the middle
    of an epoch, it draws and drops the earlier batches.
    """

    def __init__(self, make: Callable[[int], Iterable[Any]], length: int | None, loader: Any = None) -> None:
        self._make, self._length, self._loader = make, length, loader

    def set_memory(self, memory_bytes: int) -> None:
        tell_memory(self._loader, memory_bytes)

    def batches(self, seed: int, epoch: int, first: int, cpus: float | None) -> Iterator[Any]:
        stream = Stream(derive(seed, epoch))
        with stream:
            iterator = iter(self._make(epoch))
        for number in itertools.count():
            with stream:
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            if number >= first:
                yield batch

    def length(self) -> int | None:
        return self._length


def tell_memory(dataset: Any, memory_bytes: int) -> None:
    """Pass the job's memory size to the dataset, and to the datasets that it wraps (attribute `dataset`), if they have
    a method `set_memory_budget`."""
    while dataset is not None:
        if hasattr(dataset, "set_memory_budget"):
            dataset.set_memory_budget(memory_bytes)
        dataset = getattr(dataset, "dataset", None)
