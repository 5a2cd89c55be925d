"""What a backend is. `serving/config/backends.py` is the list of them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cotenant.serving.config.backends import BACKENDS
from cotenant.serving.protocol.tensors import ModelInfo

if TYPE_CHECKING:
    from cotenant.serving.worker import ModelSpec


@dataclass(frozen=True)
class Share:
    """What a backend may use: `cores` where CPU cores stand for SMs, else (`on_gpu`) a `fraction` of the GPU it sees.
    `resizes`: the backend keeps to the share itself, by green contexts, from the fraction `start` of the SMs on."""

    fraction: float
    cores: tuple[int, ...] = ()
    start: float = 0.0
    on_gpu: bool = False
    resizes: bool = False


class Backend(Protocol):
    """One loaded model on one share. Made by its module's `open_model(spec, share)`."""

    info: ModelInfo

    def run(self, inputs: list[np.ndarray], count: int) -> list[np.ndarray]:
        """Outputs for inputs, both in the order of `info`. Stacked along a first dimension of `count` where the model
        is batchable, else one item without that dimension. Any exception is an answer: its text."""

    def pace(self, count: int, submitted_s: float, expected_ms: float) -> None:
        """Called once per batch of `count` items before its results are sent, with the monotonic time of its submission
        and what it should take."""

    def resize(self, fraction: float) -> None:
        """Use another share from the next batch on; NotImplementedError where a new process is needed."""

    def lost(self) -> bool:
        """Whether the device has failed for good: nothing will run in this process any more. Asked after a failure."""

    def close(self) -> None:
        """Free what the model holds."""


def open_backend(spec: ModelSpec, share: Share) -> Backend:
    """Load a model with the backend of its name."""
    module = importlib.import_module(BACKENDS[spec.backend].module)
    backend: Backend = module.open_model(spec, share)
    return backend
