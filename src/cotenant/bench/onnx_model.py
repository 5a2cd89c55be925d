"""A small ONNX model, a perceptron. The benchmarks write it themselves, so that they need only onnxruntime, not
onnx."""

from __future__ import annotations

from typing import Any

from cotenant.core import protobuf
from cotenant.core.extras import needs

with needs("serve"):
    import numpy as np

FLOAT, IR_VERSION, OPSET = 1, 8, 13
# the part of ONNX's public schema that this model uses
_SCHEMA = {
    "ModelProto": "int64 ir_version 1, GraphProto graph 7, [OperatorSetIdProto] opset_import 8",
    "OperatorSetIdProto": "string domain 1, int64 version 2",
    "GraphProto": (
        "[NodeProto] node 1, string name 2, [TensorProto] initializer 5, [ValueInfoProto] input 11, "
        "[ValueInfoProto] output 12"
    ),
    "NodeProto": "[string] input 1, [string] output 2, string op_type 4",
    "TensorProto": "[int64] dims 1, int32 data_type 2, string name 8, bytes raw_data 9",
    "ValueInfoProto": "string name 1, TypeProto type 2",
    "TypeProto": "TypeProto.Tensor tensor_type 1",
    "TypeProto.Tensor": "int32 elem_type 1, TensorShapeProto shape 2",
    "TensorShapeProto": "[TensorShapeProto.Dimension] dim 1",
    "TensorShapeProto.Dimension": "int64 dim_value 1, string dim_param 2",
}


def perceptron(width: int = 64, layers: int = 2, seed: int = 0) -> bytes:
    """Return the ONNX model `y = f(x)` for x of shape (batch, width): `layers` matrix products with ReLU between them.
    """
    rng = np.random.default_rng(seed)
    model: Any = protobuf.classes("onnx", _SCHEMA)["ModelProto"](ir_version=IR_VERSION)
    model.opset_import.add(version=OPSET)
    graph, last = model.graph, "x"
    graph.name = "perceptron"
    for i in range(layers):
        weights = (rng.standard_normal((width, width), np.float32) / width**0.5).astype("<f4")
        graph.initializer.add(name=f"w{i}", dims=weights.shape, data_type=FLOAT, raw_data=weights.tobytes())
        final = i == layers - 1
        graph.node.add(op_type="MatMul", input=[last, f"w{i}"], output=["y" if final else f"m{i}"])
        if not final:
            graph.node.add(op_type="Relu", input=[f"m{i}"], output=[f"r{i}"])
            last = f"r{i}"
    for name, values in (("x", graph.input), ("y", graph.output)):
        tensor = values.add(name=name).type.tensor_type
        tensor.elem_type = FLOAT
        tensor.shape.dim.add(dim_param="batch")
        tensor.shape.dim.add(dim_value=width)
    return bytes(model.SerializeToString())
