"""The interface of a backend. `serving/config/backends.py` lists them."""

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
    """What a backend may use: `cores` if CPU cores stand in for SMs, else (`on_gpu`) a `fraction` of the visible GPU.
    `resizes`: the backend enforces the share itself, by green contexts, starting with the fraction `start` of the SMs.
    """

    fraction: float
    cores: tuple[int, ...] = ()
    start: float = 0.0
    on_gpu: bool = False
    resizes: bool = False


class Backend(Protocol):
    """One loaded model on one share. Created by its module's `open_model(spec, share)`."""

    info: ModelInfo

    def run(self, inputs: list[np.ndarray], count: int) -> list[np.ndarray]:
        """Outputs for inputs, both in the order of `info`. Stacked along a first dimension of `count` if the model is
        batchable, else one item without that dimension. The text of any exception is sent as the answer.
        """

    def pace(self, count: int, submitted_s: float, expected_ms: float) -> None:
        """Called once per batch of `count` items before its results are sent, with the monotonic time of its submission
        and its expected duration.
        """

    def resize(self, fraction: float) -> None:
        """Use another share from the next batch on. Raises NotImplementedError if that needs a new process."""

    def lost(self) -> bool:
        """Whether the device has failed permanently for this process. Called after a failure."""

    def close(self) -> None:
        """Free the model's resources."""


def open_backend(spec: ModelSpec, share: Share) -> Backend:
    """Load a model with the backend of its name."""
    module = importlib.import_module(BACKENDS[spec.backend].module)
    backend: Backend = module.open_model(spec, share)
    return backend
