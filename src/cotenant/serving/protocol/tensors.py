"""Tensors of the Open Inference Protocol, and their conversion to numpy arrays. Besides the standard library, this
module imports only numpy, because worker processes import this module, too.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

# data type of the protocol -> numpy type; BF16 is sent as 16-bit words, and BYTES as strings with their lengths before
# them
DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BF16": np.dtype("<u2"),
    "BYTES": np.dtype("O"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items() if name not in ("BF16", "BYTES")}
_LENGTH = struct.Struct("<I")
FREE_SIZE = 4  # size of a dimension of a random input for which the model allows any size

Buffer = bytes | bytearray | memoryview


class TensorError(ValueError):
    """A tensor whose data does not match its description, with one sentence for the client."""


@dataclass(slots=True)
class Tensor:
    """A tensor as sent: `data` is C-contiguous little-endian, BYTES as 4-byte lengths and strings."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Buffer


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a model; `shape` is that of one item (without the batch), -1: any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelInfo:
    """Description of a loaded model. `batchable`: items may be stacked along a first dimension. `text`: its strings
    must be UTF-8. `labels`: name of an output -> labels of its classes.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batchable: bool
    platform: str
    load_s: float = 0.0
    memory_bytes: int = 0
    text: bool = False
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def elements(shape: Iterable[int]) -> int:
    """Return the number of elements of a tensor with this shape."""
    return math.prod(shape)


def pack_strings(strings: Iterable[bytes]) -> bytes:
    """Encode the elements of a BYTES tensor as they are sent."""
    return b"".join(part for s in strings for part in (_LENGTH.pack(len(s)), s))


def random_data(datatype: str, count: int, rng: np.random.Generator) -> bytes:
    """Draw the data of a tensor with `count` elements."""
    if datatype == "BYTES":
        return pack_strings([b"text %d" % (i % 1000) for i in range(count)])
    if datatype == "BF16":
        return (rng.random(count, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    dtype = DTYPES[datatype]
    if dtype.kind == "f":
        return rng.random(count).astype(dtype).tobytes()
    if dtype.kind == "b":
        return (rng.random(count) < 0.5).tobytes()
    # the numbers are small, because they may be token ids, of which every model has at least a few
    return rng.integers(0, 100, count).astype(dtype).tobytes()


def unpack_strings(data: Buffer) -> list[bytes]:
    """The elements of a BYTES tensor. Raises TensorError if lengths and data disagree."""
    return [bytes(data[a:b]) for a, b in string_spans(data)]


def string_spans(data: Buffer) -> Iterator[tuple[int, int]]:
    """(start, end) of each element of a BYTES tensor."""
    at, end = 0, len(data)
    while at < end:
        if end - at < 4:
            raise TensorError("a BYTES tensor ends inside a length")
        (length,) = _LENGTH.unpack_from(data, at)
        if length > end - at - 4:
            raise TensorError("a BYTES tensor ends inside an element")
        yield at + 4, at + 4 + length
        at += 4 + length


def check_size(tensor: Tensor) -> None:
    """Raise TensorError unless the data has as many bytes (or strings) as the shape says."""
    count = elements(tensor.shape)
    if tensor.datatype == "BYTES":
        found = sum(1 for _ in string_spans(tensor.data))
        if found != count:
            raise TensorError(f"input {tensor.name!r} has {found} elements; its shape says {count}")
        return
    wanted = count * DTYPES[tensor.datatype].itemsize
    if len(tensor.data) != wanted:
        raise TensorError(f"input {tensor.name!r} has {len(tensor.data)} bytes; its shape and type say {wanted}")
    if tensor.datatype == "BOOL" and wanted and np.frombuffer(tensor.data, np.uint8).max() > 1:
        raise TensorError(f"input {tensor.name!r} is BOOL: its bytes must be 0 or 1")


def to_array(tensor: Tensor) -> np.ndarray:
    """The tensor as an array, without a copy if the type allows it."""
    return array_of(tensor.data, tensor.datatype, tensor.shape)


def array_of(data: Buffer, datatype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Array over a buffer; BYTES become an object array."""
    if datatype == "BYTES":
        out = np.empty(elements(shape), object)
        out[:] = unpack_strings(data)
        return out.reshape(shape)
    return np.frombuffer(data, DTYPES[datatype]).reshape(shape)


def from_array(name: str, array: np.ndarray, datatype: str | None = None) -> Tensor:
    """Convert an array to a tensor. `datatype`: the tensor's data type, if numpy does not have it (BF16)."""
    if array.dtype.kind in "OSU":
        flat = (x if isinstance(x, bytes) else str(x).encode() for x in array.ravel().tolist())
        return Tensor(name, "BYTES", array.shape, pack_strings(flat))
    kind = datatype or NAMES.get(array.dtype.newbyteorder("<") if array.dtype.byteorder == ">" else array.dtype)
    if kind is None:
        raise TensorError(f"output {name!r} has a type ({array.dtype}) that the protocol does not have")
    array = np.ascontiguousarray(array, DTYPES[kind])
    return Tensor(name, kind, array.shape, array.tobytes())


# data type that is not an integer -> Python types that the elements of a JSON list may have
_ELEMENTS: dict[str, set[type]] = {
    "BOOL": {bool}, "BYTES": {str}, "FP16": {int, float}, "FP32": {int, float}, "FP64": {int, float},
}  # fmt: skip


def from_list(name: str, datatype: str, shape: tuple[int, ...], data: object) -> Tensor:
    """A tensor from the (nested or flat) list of a JSON request; TensorError names what is wrong."""
    if datatype not in DTYPES:
        raise TensorError(f"input {name!r} has the unknown data type {datatype!r}")
    if not isinstance(data, list):
        raise TensorError(f"input {name!r} needs its data as a list")
    if datatype == "BF16":
        raise TensorError(f"input {name!r}: BF16 must be sent as binary data")
    while data and type(data[0]) is list:
        size = len(data[0])
        if any(type(row) is not list or len(row) != size for row in data):
            raise TensorError(f"input {name!r} is not a rectangular list of {datatype}")
        data = list(chain.from_iterable(data))
    if not set(map(type, data)) <= _ELEMENTS.get(datatype, {int}):
        raise TensorError(f"input {name!r} has elements that are not {datatype}")
    if len(data) != elements(shape):
        raise TensorError(f"input {name!r} has {len(data)} elements; its shape says {elements(shape)}")
    return Tensor(name, datatype, shape, packed(name, datatype, data))


def packed(name: str, datatype: str, values: Sequence[Any]) -> bytes:
    """Encode the elements of an input, numbers or strings from a JSON list, as the protocol's binary data. Raises
    TensorError for values outside the type.
    """
    if datatype == "BYTES":
        try:
            return pack_strings(x.encode() if isinstance(x, str) else x for x in values)
        except UnicodeEncodeError:
            raise TensorError(f"input {name!r} has a string that is not Unicode text") from None
    dtype = DTYPES[datatype]
    try:
        # without an explicit type, numpy would convert a list of 1 and 2**64 - 1 to float64
        array = np.array(values, np.float64 if dtype.kind == "f" else dtype)
    except OverflowError:
        raise TensorError(f"input {name!r} has elements outside {datatype}") from None
    with np.errstate(over="ignore"):
        converted = array.astype(dtype, copy=False)
    if dtype.kind == "f" and (np.isinf(converted) & np.isfinite(array)).any():
        raise TensorError(f"input {name!r} has elements outside {datatype}")
    return converted.tobytes()


def json_data(tensor: Tensor) -> Any:
    """An output's elements as JSON values that represent them exactly. Raises TensorError for values that JSON cannot
    represent."""
    if tensor.datatype == "BYTES":
        try:
            return [x.decode() for x in unpack_strings(tensor.data)]
        except UnicodeDecodeError:
            what = "bytes that are not UTF-8 text"
    elif tensor.datatype == "BF16":
        what = "BF16 elements"
    else:
        array = np.frombuffer(tensor.data, DTYPES[tensor.datatype])
        if array.dtype.kind != "f" or np.isfinite(array).all():
            return array.astype(np.float32) if tensor.datatype == "FP16" else array
        what = "elements that are infinite or NaN"
    raise TensorError(f"output {tensor.name!r} has {what}, which JSON cannot represent: request it as binary data")
