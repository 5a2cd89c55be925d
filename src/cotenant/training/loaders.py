"""Makes a source of batches, which can begin an epoch at any batch, from what a program passes as loader."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cotenant.core.errors import InputError
from cotenant.training.sources import IterableSource, SequenceSource, Source


def find_source(loader: Any, most_workers: int = 16) -> Source:
    """Return the source of batches for a loader, which is a torch DataLoader, a sequence, an iterable, or a function
    from the epoch to an iterable. Raises InputError for other objects. `most_workers`: largest number of worker
    processes that a DataLoader gets if the job's cores are known.
    """
    data = sys.modules.get("torch.utils.data")
    if data is not None and isinstance(loader, data.DataLoader):
        from cotenant.training.torch_source import torch_source

        return torch_source(loader, most_workers)
    if isinstance(loader, Sequence) and not isinstance(loader, str | bytes):
        return SequenceSource(loader)
    if isinstance(loader, Iterator):
        raise InputError(
            "the loader is an iterator, which cannot begin again: pass the iterable, or a function of the epoch",
            field="loader",
        )
    if isinstance(loader, Iterable):
        return IterableSource(lambda epoch: _at_epoch(loader, epoch), _length(loader), loader)
    if callable(loader):
        return IterableSource(loader, None)
    raise InputError(f"{type(loader).__name__} is neither iterable nor a function of the epoch", field="loader")


def _at_epoch(loader: Any, epoch: int) -> Iterable[Any]:
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
    iterable: Iterable[Any] = loader
    return iterable


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
