"""A small ONNX model written as bytes: a perceptron, for benchmarks on machines that have a runtime but no builder.

Protobuf's wire format, with the field numbers of ONNX's public schema.
"""

from __future__ import annotations

from cotenant.core.extras import needs

with needs("serve"):
    import numpy as np


FLOAT, IR_VERSION, OPSET = 1, 8, 13


def _varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def _int(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _value(name: str, width: int) -> bytes:
    """ValueInfoProto of a (batch, width) float tensor."""
    shape = _bytes(1, _bytes(2, "batch")) + _bytes(1, _int(1, width))
    return _bytes(1, name) + _bytes(2, _bytes(1, _int(1, FLOAT) + _bytes(2, shape)))


def _weights(name: str, array: np.ndarray) -> bytes:
    """TensorProto."""
    dims = b"".join(_int(1, size) for size in array.shape)
    return dims + _int(2, FLOAT) + _bytes(8, name) + _bytes(9, array.astype("<f4").tobytes())


def _node(kind: str, inputs: list[str], output: str) -> bytes:
    return b"".join(_bytes(1, name) for name in inputs) + _bytes(2, output) + _bytes(4, kind)


def perceptron(width: int = 64, layers: int = 2, seed: int = 0) -> bytes:
    """`y = f(x)` for x of shape (batch, width): `layers` matrix products with ReLU between them."""
    rng = np.random.default_rng(seed)
    nodes, weights, last = [], [], "x"
    for i in range(layers):
        weights.append(_weights(f"w{i}", rng.standard_normal((width, width), np.float32) / width**0.5))
        final = i == layers - 1
        nodes.append(_node("MatMul", [last, f"w{i}"], "y" if final else f"m{i}"))
        if not final:
            nodes.append(_node("Relu", [f"m{i}"], f"r{i}"))
            last = f"r{i}"
    graph = (
        b"".join(_bytes(1, node) for node in nodes) + _bytes(2, "perceptron")
        + b"".join(_bytes(5, w) for w in weights) + _bytes(11, _value("x", width)) + _bytes(12, _value("y", width))
    )  # fmt: skip
    return _int(1, IR_VERSION) + _bytes(7, graph) + _bytes(8, _bytes(1, "") + _int(2, OPSET))
