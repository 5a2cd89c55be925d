"""Divides requests into items that join batches, validates them against the model, and joins the answers."""

from __future__ import annotations

from cotenant.serving.protocol.tensors import (
    DTYPES,
    Buffer,
    ModelInfo,
    Tensor,
    TensorError,
    pack_strings,
    string_spans,
    unpack_strings,
)


def joined(answers: list[list[Tensor] | None]) -> list[Tensor]:
    """Outputs of items, stacked along a new first dimension."""
    first = answers[0]
    assert first is not None
    if len(answers) == 1:
        return [Tensor(t.name, t.datatype, (1, *t.shape), t.data) for t in first]
    out = []
    for k, tensor in enumerate(first):
        parts: list[Buffer] = []
        for row in answers:
            assert row is not None
            if row[k].shape != tensor.shape:
                raise TensorError(
                    f"output {tensor.name!r} has different shapes for different items: send one item per request"
                )
            parts.append(row[k].data)
        out.append(Tensor(tensor.name, tensor.datatype, (len(answers), *tensor.shape), b"".join(parts)))
    return out


def check_inputs(inputs: list[Tensor], info: ModelInfo) -> tuple[list[Tensor], int]:
    """Validate a request: (inputs in the model's order, number of items). TensorError names what does not fit the
    model."""
    specs, batchable = info.inputs, info.batchable
    if len(inputs) != len(specs):
        given, wanted = ", ".join(t.name for t in inputs), ", ".join(s.name for s in specs)
        raise TensorError(f"the model takes {len(specs)} inputs ({wanted}); got {len(inputs)} ({given})")
    ordered, rows = [], 1
    for k, spec in enumerate(specs):
        tensor = inputs[k]
        if tensor.name != spec.name:
            tensor = next((t for t in inputs if t.name == spec.name), tensor)
            if tensor.name != spec.name:
                raise TensorError(f"input {spec.name!r} is missing")
        if tensor.datatype != spec.datatype:
            raise TensorError(f"input {spec.name!r} must be {spec.datatype}, not {tensor.datatype}")
        shape = tensor.shape
        item = shape[1:] if batchable else shape
        if (
            len(item) != len(spec.shape)
            or (batchable and not shape)
            or any(size not in (-1, got) for size, got in zip(spec.shape, item, strict=True))
        ):
            wanted_shape = [-1, *spec.shape] if batchable else list(spec.shape)
            raise TensorError(f"input {spec.name!r} has shape {list(shape)}; the model takes {wanted_shape}")
        if batchable:
            if k == 0:
                rows = shape[0]
            elif shape[0] != rows:
                raise TensorError(f"input {spec.name!r} has {shape[0]} items, the first input {rows}")
        if info.text and tensor.datatype == "BYTES" and not _is_text(tensor.data):
            raise TensorError(f"input {spec.name!r} has bytes that are not UTF-8, but the model's strings are text")
        ordered.append(tensor)
    if rows == 0:
        raise TensorError("a request needs at least one item")
    return ordered, rows


def _is_text(data: Buffer) -> bool:
    try:
        return all(str(data[a:b], "utf-8") is not None for a, b in string_spans(data))
    except UnicodeDecodeError:
        return False


def split(inputs: list[Tensor], rows: int, batchable: bool) -> list[list[Tensor]]:
    """Inputs divided into items of the model's shape; only strings are copied."""
    if not batchable:
        return [inputs]
    if rows == 1:
        return [[Tensor(t.name, t.datatype, t.shape[1:], t.data) for t in inputs]]
    units: list[list[Tensor]] = [[] for _ in range(rows)]
    for tensor in inputs:
        shape = tensor.shape[1:]
        if tensor.datatype == "BYTES":
            strings = unpack_strings(tensor.data)
            per = len(strings) // rows
            for i, unit in enumerate(units):
                unit.append(Tensor(tensor.name, "BYTES", shape, pack_strings(strings[i * per : (i + 1) * per])))
            continue
        view = memoryview(tensor.data)
        size = DTYPES[tensor.datatype].itemsize
        for dimension in shape:
            size *= dimension
        for i, unit in enumerate(units):
            unit.append(Tensor(tensor.name, tensor.datatype, shape, view[i * size : (i + 1) * size]))
    return units
