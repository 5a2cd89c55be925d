"""ONNX models for tests, made here."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def dense_model(folder: Path, width: int, layers: int, seed: int = 0) -> Path:
    """A chain of dense layers in a model repository: X [b, width] -> Y [b, width]."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(seed)
    nodes, weights, last = [], [], "X"
    for i in range(layers):
        matrix = rng.normal(size=(width, width)).astype(np.float32) / np.float32(np.sqrt(width))
        weights.append(numpy_helper.from_array(matrix, f"W{i}"))
        out = "Y" if i == layers - 1 else f"H{i}"
        nodes += [helper.make_node("MatMul", [last, f"W{i}"], [f"M{i}"]), helper.make_node("Tanh", [f"M{i}"], [out])]
        last = out
    sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", width]) for name in ("X", "Y")]
    graph = helper.make_graph(nodes, "dense", sides[:1], sides[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    target = folder / "1"
    target.mkdir(parents=True)
    onnx.save(model, target / "model.onnx")
    return folder
