"""The interface of a backend, which runs models in a worker. `serving/config/backends.py` lists the backends."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cotenant.serving.config.backends import BACKENDS
from cotenant.serving.protocol.tensors import ModelInfo

if TYPE_CHECKING:
    from cotenant.serving.worker import ModelSpec


@dataclass(frozen=True)
class Share:
    """What a backend may use. `on_gpu`: a `fraction` of the visible GPU; otherwise the CPU `cores`, which stand in for
    SMs. `resizes`: the backend enforces the share itself, by green contexts, starting with the fraction `start` of the
    SMs.
    """

    fraction: float
    cores: tuple[int, ...] = ()
    start: float = 0.0
    on_gpu: bool = False
    resizes: bool = False


class Backend(ABC):
    """One loaded model on one share. Created by its module's `open_model(spec, share)`."""

    info: ModelInfo

    @abstractmethod
    def run(self, inputs: list[np.ndarray], count: int) -> list[np.ndarray]:
        """Run the model: returns its outputs. Inputs and outputs are in the order of `info`. If the model is batchable,
        `count` items are stacked along the first dimension; otherwise there is one item without that dimension. The
        text of any exception is sent as the answer.
        """

    def pace(self, count: int, submitted_s: float, expected_ms: float) -> None:  # noqa: B027 most models compute
        """Wait until the batch has taken as long as it should. Backends that compute need no wait; the backend `timed`
        computes nothing and only takes the time. The worker calls this once per batch of `count` items before it sends
        the results. `submitted_s`: monotonic time of the submission of the batch; `expected_ms`: its planned duration.
        """

    def resize(self, fraction: float) -> bool:
        """Run on another share of the GPU from the next batch on. Returns False if that needs a new process."""
        return False

    def lost(self) -> bool:
        """Whether the device has failed permanently for this process. The worker calls this when a batch has failed."""
        return False

    def close(self) -> None:  # noqa: B027 not every model holds anything
        """Free the device memory and other resources of the model."""


def open_backend(spec: ModelSpec, share: Share) -> Backend:
    """Load a model with the backend that `spec.backend` names."""
    module = importlib.import_module(BACKENDS[spec.backend].module)
    backend: Backend = module.open_model(spec, share)
    return backend
