"""Creates ONNX models for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def dense_model(folder: Path, width: int = 256, layers: int = 12, seed: int = 0) -> Path:
    """Write a model of dense layers into a repository: X [b, width] -> Y [b, width]. X is expanded to a square inside,
    and all layers share one matrix that fits into the cache of a core. So the time of a request is computation,
    requests are small, and the memory traffic of other processes hardly affects it."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(width, width)).astype(np.float32) / np.float32(np.sqrt(width))
    weights = [
        numpy_helper.from_array(matrix, "W"),
        numpy_helper.from_array(rng.normal(size=(width, 1)).astype(np.float32), "C"),
        numpy_helper.from_array(np.array([1], np.int64), "axis"),
    ]
    nodes = [helper.make_node("Unsqueeze", ["X", "axis"], ["row"]), helper.make_node("Mul", ["row", "C"], ["H0"])]
    for i in range(layers):
        nodes += [
            helper.make_node("MatMul", [f"H{i}", "W"], [f"M{i}"]),
            helper.make_node("Relu", [f"M{i}"], [f"H{i + 1}"]),
        ]
    nodes.append(helper.make_node("ReduceMean", [f"H{layers}"], ["Y"], axes=[1], keepdims=0))
    sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", width]) for name in ("X", "Y")]
    graph = helper.make_graph(nodes, "dense", sides[:1], sides[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    target = folder / "1"
    target.mkdir(parents=True)
    onnx.save(model, target / "model.onnx")
    return folder
