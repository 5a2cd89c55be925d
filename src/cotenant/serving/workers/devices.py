"""Assigns GPUs to worker processes, with the environment by which the mechanism enforces their shares."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from functools import partial

from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.agent.mechanisms.base import Use, WorkerShare
from cotenant.core.errors import InputError, WorkError
from cotenant.core.temporary import temporary_folder
from cotenant.devices.base import Gpu
from cotenant.devices.registry import discover
from cotenant.serving.worker import WorkerSpec


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process may use: those of CUDA_VISIBLE_DEVICES in its order, else all."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    wanted = ["all"] if text is None else [part.strip() for part in text.split(",") if part.strip()]
    try:
        return discover(wanted)
    except InputError as error:
        raise WorkError(f"CUDA_VISIBLE_DEVICES: {error.message}") from None
    except WorkError:
        hint = (
            "use `mechanism: cores` to serve on CPU cores, or `backend: timed`, which only sleeps as long as a "
            "profile says"
        )
        raise WorkError(f"no NVIDIA GPU was found here: {hint}") from None


class Devices:
    """Assigns GPUs to workers. A mechanism may start servers for the first worker of a GPU; `close` ends them."""

    def __init__(self, mechanism: str, count: int, find: Callable[[], tuple[Gpu, ...]] = visible_gpus) -> None:
        self.gpus = find()
        if len(self.gpus) < count:
            raise WorkError(f"the services file has {count} GPUs; {len(self.gpus)} can be used here")
        self._closing = contextlib.ExitStack()
        tidy = partial(mechanisms.end_left_behind, use=Use.SERVICE, gpus=self.gpus)
        folder = self._closing.enter_context(temporary_folder("gpu", tidy))
        self._mechanism = mechanisms.find(mechanism)(folder, self.gpus)

    def environment(self, spec: WorkerSpec) -> Mapping[str, str]:
        """Assign a GPU to a worker. Returns the variables that must be added to the worker's environment."""
        share = WorkerShare(spec.name, spec.fraction, spec.partition)
        return self._mechanism.worker_environment(share, self.gpus[spec.gpu])

    def released(self, spec: WorkerSpec) -> None:
        """Called when a worker has ended: frees its share of the GPU."""
        self._mechanism.worker_gone(spec.name)

    def close(self) -> None:
        """Called when all workers have ended: ends what the mechanism has started for them."""
        self._mechanism.close()
        self._closing.close()
