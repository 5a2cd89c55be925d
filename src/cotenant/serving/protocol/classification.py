"""The classification extension: returns the largest elements of an output with their indices and labels instead of the
tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cotenant.serving.protocol.tensors import Tensor, TensorError, pack_strings, to_array

MOST_CLASSES = 10_000


def wanted(name: str, parameters: Mapping[str, Any]) -> int:
    """Number of classes that the client requested for an output; 0 if it wants the tensor."""
    count = parameters.get("classification", 0)
    if type(count) is not int or not 0 <= count <= MOST_CLASSES:
        raise TensorError(f"output {name!r}: classification must be a number of classes up to {MOST_CLASSES}")
    return count


def classified(tensor: Tensor, count: int, labels: Sequence[str], batchable: bool) -> Tensor:
    """The `count` largest elements of each item as strings, VALUE:INDEX or VALUE:INDEX:LABEL."""
    if tensor.datatype in ("BYTES", "BF16", "BOOL"):
        raise TensorError(f"output {tensor.name!r} is {tensor.datatype}: only numbers are classified")
    array = to_array(tensor)
    rows = array.reshape(array.shape[0] if batchable else 1, -1)
    count = min(count, rows.shape[1])
    found = []
    for row in rows:
        for i in np.argsort(-row.astype(np.float64), kind="stable")[:count].tolist():
            value = f"{row[i]:f}" if row.dtype.kind == "f" else str(row[i])
            found.append(f"{value}:{i}:{labels[i]}" if i < len(labels) else f"{value}:{i}")
    shape = (len(rows), count) if batchable else (count,)
    return Tensor(tensor.name, "BYTES", shape, pack_strings(x.encode() for x in found))
