"""ONNX models that return their inputs, one for each data type, and the extreme values of each type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

MOST = 2**64 - 1
VALUES: dict[str, list[Any]] = {
    "BOOL": [True, False],
    "UINT8": [0, 255],
    "UINT16": [0, 65535],
    "UINT32": [0, 2**32 - 1],
    "UINT64": [MOST, 1, 2**63 + 1, 5, 2**53 + 1, 0],
    "INT8": [-128, 127],
    "INT16": [-32768, 32767],
    "INT32": [-(2**31), 2**31 - 1],
    "INT64": [-(2**63), 2**63 - 1, 2**53 + 1],
    "FP16": [65504.0, 2.0**-24, -0.0, -1.5],
    "FP32": [float(np.finfo(np.float32).max), 2.0**-149, -0.0, float(np.float32(0.1))],
    "FP64": [1.7976931348623157e308, 5e-324, -0.0, 0.1, 2.0**53 + 2],
    "BYTES": ["", "ä€😀", "a\0b", "x" * 300],
}
ELEMENTS = {
    "BOOL": "BOOL", "UINT8": "UINT8", "UINT16": "UINT16", "UINT32": "UINT32", "UINT64": "UINT64", "INT8": "INT8",
    "INT16": "INT16", "INT32": "INT32", "INT64": "INT64", "FP16": "FLOAT16", "FP32": "FLOAT", "FP64": "DOUBLE",
    "BYTES": "STRING",
}  # fmt: skip
FIELDS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip


def identity(path: Path, *datatypes: str) -> None:
    """Write a model into a repository. Its inputs x, x1, ... have these types and two dimensions of any size, and are
    returned as y, y1, ..."""
    import onnx

    helper = onnx.helper
    ends = [str(n or "") for n in range(len(datatypes))]
    kinds = [getattr(onnx.TensorProto, ELEMENTS[x]) for x in datatypes]
    ins, outs = (
        [helper.make_tensor_value_info(f"{side}{end}", kind, ["n", "m"]) for end, kind in zip(ends, kinds, strict=True)]
        for side in "xy"
    )
    nodes = [helper.make_node("Identity", [f"x{end}"], [f"y{end}"]) for end in ends]
    model = helper.make_model(
        helper.make_graph(nodes, "g", ins, outs), ir_version=8, opset_imports=[helper.make_opsetid("", 13)]
    )
    (path / "1").mkdir(parents=True)
    onnx.save(model, path / "1" / "model.onnx")


def identities(folder: Path) -> dict[str, Any]:
    """A deployment with a service named after each type, and `pair`, which takes FP32 and INT64."""
    import json

    from serve_setup import PROFILE, deployment

    names = [*ELEMENTS, "pair"]
    for name in ELEMENTS:
        identity(folder / name, name)
    identity(folder / "pair", "FP32", "INT64")
    services = [{"name": x, "model": f"{folder}/{x}", "backend": "onnx", "slo_ms": 20_000} for x in names]
    content = deployment(services, folder) | {"mechanism": "cores"}
    profile = PROFILE | {"models": dict.fromkeys(names, PROFILE["models"]["a"])}
    Path(content["profile"]).write_text(json.dumps(profile))
    return content
