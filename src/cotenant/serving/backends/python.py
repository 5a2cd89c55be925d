"""Backend python: models that are Python files, model.py with INPUTS, OUTPUTS and a function run.

    INPUTS = [("X", "FP32", [4])]        # name, type, shape of one item; -1: any size
    OUTPUTS = [("SUM", "FP32", [1])]

    def run(x):                          # arrays in the order of INPUTS, batch dimension first
        return x.sum(axis=1, keepdims=True)

With BATCHABLE = False, `run` is called for each item. The worker executes the file with the server's permissions.
"""

from __future__ import annotations

import runpy
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cotenant.serving.backends.base import Backend, Share
from cotenant.serving.config.backends import FILE_FIELD
from cotenant.serving.protocol.tensors import DTYPES, ModelInfo, TensorSpec

if TYPE_CHECKING:
    from cotenant.serving.worker import ModelSpec

FILE = "model.py"


class PythonModel(Backend):
    """A model that is a file model.py in its version folder."""

    def __init__(self, spec: ModelSpec) -> None:
        began = time.monotonic()
        assert spec.path is not None
        names = runpy.run_path(str(Path(spec.path) / spec.config.get(FILE_FIELD, FILE)))
        if not callable(names.get("run")):
            raise ValueError(f"{FILE} has no function run")
        self._run: Any = names["run"]
        inputs, outputs = _tensors(names, "INPUTS"), _tensors(names, "OUTPUTS")
        batchable = bool(names.get("BATCHABLE", True))
        self.info = ModelInfo(inputs, outputs, batchable, "python", time.monotonic() - began)

    def run(self, inputs: list[np.ndarray], count: int) -> list[np.ndarray]:
        found = self._run(*inputs)
        given = list(found) if isinstance(found, list | tuple) else [found]
        if len(given) != len(self.info.outputs):
            raise ValueError(f"run returned {len(given)} arrays, but OUTPUTS has {len(self.info.outputs)}")
        return [np.asarray(x, DTYPES[s.datatype]) for x, s in zip(given, self.info.outputs, strict=True)]


def _tensors(names: dict[str, Any], which: str) -> tuple[TensorSpec, ...]:
    """Read the variable INPUTS or OUTPUTS of a model's file. Raises ValueError that says what is wrong."""
    rows = names.get(which)
    try:
        found = tuple(TensorSpec(str(name), str(kind), tuple(map(int, shape))) for name, kind, shape in rows or ())
    except (TypeError, ValueError):
        raise ValueError(f'{which} of {FILE} are not rows such as ("X", "FP32", [4])') from None
    if not found:
        raise ValueError(f"{FILE} has no {which}")
    unknown = next((x for x in found if x.datatype not in DTYPES), None)
    if unknown is not None:
        raise ValueError(f"{unknown.name} of {FILE} is {unknown.datatype}, which is not one of {', '.join(DTYPES)}")
    return found


def open_model(spec: ModelSpec, share: Share) -> PythonModel:
    """Execute the model's file. The share is ignored here, since it is enforced from outside the process."""
    del share
    return PythonModel(spec)
