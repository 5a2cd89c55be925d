"""Reads, restores and seeds a process's random number generators: Python's, and those of numpy and torch if loaded."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

State = dict[str, Any]


def take() -> State:
    """Read the states of all random number generators: Python's, numpy's global generator, and torch's for the CPU and
    each GPU.
    """
    state, torch = _take_cpu(), sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def put(state: State) -> None:
    """Restore the generators' states that `take` returned. Generators of GPUs that are not in `state` are left
    unchanged.
    """
    random.setstate(state["python"])
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(state["numpy"])
    if torch is None or "torch" not in state:
        return
    torch.set_rng_state(state["torch"])
    for device, one in enumerate(state.get("cuda", ())):
        if device < torch.cuda.device_count():
            torch.cuda.set_rng_state(one, device)


def set_all(seed: int) -> None:
    """Seed all random number generators of the CPU."""
    random.seed(seed)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    if torch is not None:
        torch.default_generator.manual_seed(seed % 2**63)


@contextlib.contextmanager
def apart(seed: int) -> Iterator[None]:
    """Return a context manager: within it the CPU's random number generators start from a seed; afterwards they have
    their previous state.
    """
    kept = _take_cpu()
    set_all(seed)
    try:
        yield
    finally:
        put(kept)


def derive(*parts: object) -> int:
    """Return a seed of 63 bits from any values, equal on all machines and in all processes."""
    text = "/".join(map(repr, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _take_cpu() -> State:
    state: State = {"python": random.getstate()}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    if torch is not None:
        state["torch"] = torch.get_rng_state()
    return state


class Stream:
    """A separate stream of random numbers from a seed. Code inside `with stream` uses the stream's generators of the
    CPU; the process's own generators are unchanged afterwards. A stream can be entered repeatedly and continues.
    """

    def __init__(self, seed: int) -> None:
        with apart(seed):
            self._own = _take_cpu()
        self._kept: State = {}

    def __enter__(self) -> None:
        self._kept = _take_cpu()
        put(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = _take_cpu()
        put(self._kept)
