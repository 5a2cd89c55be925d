"""What a model's configuration says of its inputs and outputs: names, types, dims, reshape, files of labels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cotenant.serving.protocol.tensors import ModelInfo, TensorSpec
from cotenant.serving.worker import ModelSpec


@dataclass(frozen=True)
class Shapes:
    """Shapes of one item that differ between a request and its model (`reshape` of the configuration), None: equal.
    `ins`: of the model's inputs; `outs`: of the answer's outputs.
    """

    ins: tuple[tuple[int, ...] | None, ...]
    outs: tuple[tuple[int, ...] | None, ...]

    @property
    def any(self) -> bool:
        """Whether any tensor is reshaped."""
        return any(shape is not None for shape in (*self.ins, *self.outs))

    def inputs(self, arrays: list[np.ndarray], count: int) -> list[np.ndarray]:
        """Give the inputs of a batch of `count` items the model's shapes."""
        return _reshaped(arrays, self.ins, count)

    def outputs(self, arrays: list[np.ndarray], count: int) -> list[np.ndarray]:
        """Give the outputs of a batch of `count` items the configuration's shapes."""
        return _reshaped(arrays, self.outs, count)


def _reshaped(arrays: list[np.ndarray], shapes: Sequence[tuple[int, ...] | None], count: int) -> list[np.ndarray]:
    return [
        array if shape is None else np.asarray(array).reshape(count, *shape)
        for array, shape in zip(arrays, shapes, strict=True)
    ]


def entries(config: Mapping[str, Any], side: str) -> Sequence[Mapping[str, Any]]:
    """Return the inputs or the outputs (`side`: input or output) that a config.pbtxt lists. In the settings file of a
    timed model, the key `output` has the output's name instead of a list: then nothing is returned.
    """
    found = config.get(side)
    return found if isinstance(found, list) else ()


def labels(model: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Labels of the outputs for which the configuration names a file of labels. The file is in the model's folder."""
    found = {}
    for entry in entries(model.config, "output"):
        file = entry.get("label_filename")
        # the configuration may come from the network, so it must not name files outside the folder
        if file and Path(file).name != file:
            raise ValueError(f"label_filename {file!r} is not the name of a file in the model's folder")
        if file and model.path is not None:
            text = (Path(model.path).parent / file).read_text(encoding="utf-8")
            found[entry["name"]] = tuple(line.strip() for line in text.splitlines())
    return found


def shaped(config: Mapping[str, Any], info: ModelInfo) -> tuple[ModelInfo, Shapes]:
    """Return the model's description as the configuration has it, and what is to be reshaped. A configuration may fix
    sizes that the model leaves free, and change shapes by `reshape`. Raises ValueError if its inputs or outputs are not
    the model's.
    """
    inputs, ins = _side("input", config, info, info.inputs)
    outputs, outs = _side("output", config, info, info.outputs)
    return replace(info, inputs=inputs, outputs=outputs), Shapes(ins, outs)


def _side(
    side: str, config: Mapping[str, Any], info: ModelInfo, specs: tuple[TensorSpec, ...]
) -> tuple[tuple[TensorSpec, ...], tuple[tuple[int, ...] | None, ...]]:
    known = {spec.name: spec for spec in specs}
    found: dict[str, TensorSpec] = {}
    reshaped: dict[str, tuple[int, ...]] = {}
    for entry in entries(config, side):
        name = entry.get("name", "")
        spec = known.get(name)
        if spec is None:
            raise ValueError(f"the configuration has the {side} {name!r}; the model's are {', '.join(known)}")
        if name in found:
            raise ValueError(f"the configuration has the {side} {name!r} twice")
        kind = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
        if entry.get("data_type", kind) != kind:
            raise ValueError(f"{side} {name!r} is {kind}, not {entry['data_type']} as the configuration says")
        dims = tuple(entry.get("dims", ()))
        own = tuple(entry["reshape"].get("shape", ())) if "reshape" in entry else dims
        found[name] = spec
        if "reshape" in entry:
            if len(own) != len(spec.shape) or not _fits(own, spec.shape):
                raise ValueError(f"{side} {name!r} has the dims {[*spec.shape]}, not {[*own]} as its reshape says")
            if min((*dims, *own, 0)) >= 0 and math.prod(dims) != math.prod(own):
                raise ValueError(f"{side} {name!r} has a reshape from {[*dims]} to {[*own]}, which has another size")
            if max(own.count(-1), dims.count(-1)) > 1:
                raise ValueError(f"{side} {name!r} has a reshape with more than one free size")
            found[name] = replace(spec, shape=dims)
            reshaped[name] = own if side == "input" else dims
        elif dims and _fits(dims, spec.shape):
            both = zip(dims, spec.shape, strict=True)
            found[name] = replace(spec, shape=tuple(max(size) for size in both))
        elif dims and not (info.batchable and _fits(dims, (-1, *spec.shape))):
            raise ValueError(f"{side} {name!r} has the dims {[*spec.shape]}, not {[*dims]} as the configuration says")
    specs = tuple(found.get(spec.name, spec) for spec in specs)
    return specs, tuple(reshaped.get(spec.name) for spec in specs)


def _fits(dims: Sequence[int], shape: Sequence[int]) -> bool:
    return len(dims) == len(shape) and all(a == b or -1 in (a, b) for a, b in zip(dims, shape, strict=True))
