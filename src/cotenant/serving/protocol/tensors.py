"""Tensors as the Open Inference Protocol names them, and numpy arrays. Imports numpy only: workers use it too."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

# data type of the protocol -> numpy; BF16 travels as raw 16-bit words, BYTES as length-prefixed strings
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

Buffer = bytes | bytearray | memoryview


class TensorError(ValueError):
    """A tensor that is not what it says: one sentence for the client."""


@dataclass(slots=True)
class Tensor:
    """A tensor on its way: `data` is C-contiguous little-endian, BYTES as 4-byte lengths and strings."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Buffer


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a model; `shape` is that of one item (without the batch), -1 where any size goes."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelInfo:
    """What a worker found when it loaded a model. `batchable`: items may be stacked along a first dimension."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batchable: bool
    platform: str
    load_s: float = 0.0
    memory_bytes: int = 0


def elements(shape: Iterable[int]) -> int:
    """Number of elements of a shape."""
    return math.prod(shape)


def pack_strings(strings: Iterable[bytes]) -> bytes:
    """BYTES elements as they travel."""
    return b"".join(part for s in strings for part in (_LENGTH.pack(len(s)), s))


def unpack_strings(data: Buffer) -> list[bytes]:
    """The elements of a BYTES tensor; TensorError when lengths and data disagree."""
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
    """TensorError unless the data has as many bytes (or strings) as the shape says."""
    count = elements(tensor.shape)
    if tensor.datatype == "BYTES":
        found = sum(1 for _ in string_spans(tensor.data))
        if found != count:
            raise TensorError(f"input {tensor.name!r} has {found} elements; its shape says {count}")
        return
    wanted = count * DTYPES[tensor.datatype].itemsize
    if len(tensor.data) != wanted:
        raise TensorError(f"input {tensor.name!r} has {len(tensor.data)} bytes; its shape and type say {wanted}")


def to_array(tensor: Tensor) -> np.ndarray:
    """The tensor as an array, without a copy where the type allows."""
    return array_of(tensor.data, tensor.datatype, tensor.shape)


def array_of(data: Buffer, datatype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Array over a buffer; BYTES become an object array."""
    if datatype == "BYTES":
        out = np.empty(elements(shape), object)
        out[:] = unpack_strings(data)
        return out.reshape(shape)
    return np.frombuffer(data, DTYPES[datatype]).reshape(shape)


def from_array(name: str, array: np.ndarray, datatype: str | None = None) -> Tensor:
    """An array as a tensor. `datatype` where numpy cannot know it (BF16)."""
    if array.dtype.kind in "OSU":
        flat = (x if isinstance(x, bytes) else str(x).encode() for x in array.ravel().tolist())
        return Tensor(name, "BYTES", array.shape, pack_strings(flat))
    kind = datatype or NAMES.get(array.dtype.newbyteorder("<") if array.dtype.byteorder == ">" else array.dtype)
    if kind is None:
        raise TensorError(f"output {name!r} has a type ({array.dtype}) that the protocol does not know")
    array = np.ascontiguousarray(array, DTYPES[kind])
    return Tensor(name, kind, array.shape, array.tobytes())


# kinds of numpy arrays that a JSON list may become, for each data type
_KINDS = {"BOOL": "b", "FP16": "fiu", "FP32": "fiu", "FP64": "fiu", "BYTES": "U"}


def from_list(name: str, datatype: str, shape: tuple[int, ...], data: object) -> Tensor:
    """A tensor from the (nested or flat) list of a JSON request; TensorError names what is wrong."""
    dtype = DTYPES.get(datatype)
    if dtype is None:
        raise TensorError(f"input {name!r} has the unknown data type {datatype!r}")
    if not isinstance(data, list):
        raise TensorError(f"input {name!r} needs its data as a list")
    if datatype == "BF16":
        raise TensorError(f"input {name!r}: BF16 travels as binary data only")
    try:
        if datatype == "BYTES":
            array = np.array(data, object)
            flat = array.ravel().tolist()
            if not all(isinstance(x, str) for x in flat):
                raise TensorError(f"input {name!r} is BYTES: its elements are strings")
            packed: Buffer = pack_strings(x.encode() for x in flat)
            size = len(flat)
        else:
            array = np.array(data) if data else np.zeros(0, dtype)
            if array.dtype.kind not in _KINDS.get(datatype, "iu"):
                raise TensorError(f"input {name!r} has elements that are no {datatype}")
            if array.dtype != dtype:
                array = _converted(name, datatype, array, dtype)
            packed, size = array.tobytes(), array.size
    except (ValueError, OverflowError, UnicodeEncodeError, RecursionError) as error:
        if isinstance(error, TensorError):
            raise
        raise TensorError(f"input {name!r} is no rectangular list of {datatype}") from None
    if size != elements(shape):
        raise TensorError(f"input {name!r} has {size} elements; its shape says {elements(shape)}")
    return Tensor(name, datatype, shape, packed)


def _converted(name: str, datatype: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise TensorError(f"input {name!r} has elements outside {datatype}")
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    if dtype.kind == "f" and not np.isfinite(converted).all() and np.isfinite(array).all():
        raise TensorError(f"input {name!r} has elements outside {datatype}")
    return converted
