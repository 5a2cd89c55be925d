"""Backend timed: a model that only sleeps as long as its profile says, on partitions of any size, without a GPU.

OUTPUT is INPUT plus a number derived from the model's name (`offset`), so that answers of a wrong model are detected.
The file timed.json of a model's version may define other inputs and outputs, and faults to inject in tests:

    {"inputs": [{"name": "INPUT", "datatype": "FP32", "shape": [4]}], "latency_ms": {"1": 2.0, "8": 5.0},
     "faults": {"on_load": "crash|hang|memory|error", "on_value": {"666": "crash|hang|memory|error|lost"}}}

`on_load` is the fault that occurs when the model is loaded. `on_value` maps values to faults: the fault occurs when the
first number of an item of a batch is the value. The faults are: crash (the process aborts), hang (it sleeps for an
hour), memory and error (an exception is raised), and lost (that batch and all later ones of the process fail, as on a
device whose MPS server died).
"""

from __future__ import annotations

import os
import time
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from cotenant.serving.backends.base import Backend, Share
from cotenant.serving.protocol.tensors import NAMES, ModelInfo, TensorSpec

if TYPE_CHECKING:
    from cotenant.serving.worker import ModelSpec

DEFAULT_INPUT = {"name": "INPUT", "datatype": "FP32", "shape": [-1]}
SPIN_S = 0.0003  # a process that sleeps may wake up this much too late


def offset(model: str) -> float:
    """The number that a timed model adds to its input."""
    return float(zlib.crc32(model.encode()) % 1000)


class TimedModel(Backend):
    """A model that sleeps for its profiled latency instead of computing."""

    def __init__(self, spec: ModelSpec) -> None:
        config: dict[str, Any] = dict(spec.config)
        raw = config.get("inputs", [DEFAULT_INPUT])
        inputs = tuple(TensorSpec(x["name"], x["datatype"], tuple(x["shape"])) for x in raw)
        first = inputs[0]
        output = config.get("output", "OUTPUT")
        self.info = ModelInfo(inputs, (TensorSpec(output, first.datatype, first.shape),), True, "timed")
        self._ms = _times(spec)
        self._offset = np.array(offset(spec.model))
        self._lost = False
        faults = config.get("faults", {})
        self._on_value = {float(k): v for k, v in faults.get("on_value", {}).items()}
        _fault(faults.get("on_load"))
        time.sleep(float(config.get("load_s", 0.0)))

    def run(self, inputs: list[np.ndarray], count: int) -> list[np.ndarray]:
        data = inputs[0]
        if self._on_value and data.size:
            for value in data.reshape(count, -1)[:, 0].tolist():
                kind = self._on_value.get(float(value))
                self._lost = self._lost or kind == "lost"
                _fault(kind)
        if self._lost:
            raise RuntimeError("the device is lost, as the drill requested")
        if data.dtype not in NAMES or data.dtype.kind == "b":
            return [data]
        return [(data + self._offset).astype(data.dtype)]

    def pace(self, count: int, submitted_s: float, expected_ms: float) -> None:
        """Sleep until the batch should be done. The time counts from the batch's submission, so it includes the time in
        which the batch was handed over to the worker.
        """
        own = self._ms[min(count, len(self._ms)) - 1] if self._ms else expected_ms
        until = submitted_s + own / 1000.0
        left = until - time.monotonic()
        if left > SPIN_S:
            time.sleep(left - SPIN_S)
        while time.monotonic() < until:
            time.sleep(0)

    def lost(self) -> bool:
        """Whether an injected fault has made the device fail; see Backend."""
        return self._lost


def _times(spec: ModelSpec) -> list[float]:
    """Milliseconds for each batch size from 1 on, interpolated linearly in the table of timed.json. An empty list, if
    there is no table, means that batches take their planned time."""
    own = {int(k): float(v) for k, v in dict(spec.config.get("latency_ms", {})).items()}
    sizes = sorted(own)
    return np.interp(range(1, spec.batch + 1), sizes, [own[b] for b in sizes]).tolist() if own else []


def _fault(kind: str | None) -> None:
    """Fail in the way that `kind` names, as described at the top of the module. None and "lost" do nothing here."""
    if kind == "crash":
        os.abort()
    if kind == "hang":
        time.sleep(3600)
    if kind == "memory":
        raise MemoryError("as the drill requested")
    if kind == "error":
        raise RuntimeError("failed, as the drill requested")


def open_model(spec: ModelSpec, share: Share) -> TimedModel:
    """Create a timed model. The share is ignored, since the model's times are those of its partition."""
    del share
    return TimedModel(spec)
