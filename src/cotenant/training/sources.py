"""Sources of batches by number: every source can begin an epoch at any batch and gives the same batches again.

What a loader draws (its order, its augmentations) depends only on the seed, the epoch and the batch's number. So it
needs no saving, and it does not change with the number of workers, which follows the cores of the job.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cotenant.training.randomness import Stream, derive


class Source(ABC):
    """Batches of epochs."""

    @abstractmethod
    def batches(self, seed: int, epoch: int, first: int, cpus: float | None) -> Iterator[Any]:
        """The batches of an epoch from number `first` on. `cpus`: cores the job has, None: not known."""

    def length(self) -> int | None:
        """Batches per epoch, None: not known."""
        return None

    def workers(self, cpus: float | None) -> int:
        """Processes that prepare batches with that many cores."""
        return 0

    def samples_per_batch(self) -> int | None:
        """Samples in a batch, None: not known."""
        return None

    def set_memory(self, memory_bytes: int) -> None:  # noqa: B027 most sources keep nothing
        """Pass the job's memory size to code that keeps data in memory."""


class SequenceSource(Source):
    """A sequence of batches, the same in every epoch."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def batches(self, seed: int, epoch: int, first: int, cpus: float | None) -> Iterator[Any]:
        """See Source."""
        if isinstance(self._batches, list | tuple | range):  # a list or range draws no random numbers
            yield from self._batches[first:]
            return
        for number in range(first, len(self._batches)):
            with Stream(derive(seed, epoch, number)):
                batch = self._batches[number]
            yield batch

    def length(self) -> int | None:
        """See Source."""
        return len(self._batches)


class IterableSource(Source):
    """Anything that can be iterated again for each epoch, or a function from the epoch to an iterable. To begin in the
    middle, the earlier batches are drawn and dropped.
    """

    def __init__(self, make: Callable[[int], Iterable[Any]], length: int | None, loader: Any = None) -> None:
        self._make, self._length, self._loader = make, length, loader

    def set_memory(self, memory_bytes: int) -> None:
        """See Source."""
        tell_memory(self._loader, memory_bytes)

    def batches(self, seed: int, epoch: int, first: int, cpus: float | None) -> Iterator[Any]:
        """See Source."""
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
        """See Source."""
        return self._length


def tell_memory(dataset: Any, memory_bytes: int) -> None:
    """Pass the job's memory size to the data set, and to the one that it wraps (`.dataset`), if it has a method for
    that."""
    while dataset is not None:
        if hasattr(dataset, "set_memory_budget"):
            dataset.set_memory_budget(memory_bytes)
        dataset = getattr(dataset, "dataset", None)
