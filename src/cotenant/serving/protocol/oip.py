"""The HTTP form of the Open Inference Protocol v2: JSON, with tensors as lists or as binary data after the JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from cotenant.serving.protocol.classification import wanted as wanted_classes
from cotenant.serving.protocol.shared_memory import Place, Regions
from cotenant.serving.protocol.tensors import DTYPES, Buffer, Tensor, TensorError, check_size, from_list, json_data

HEADER_LENGTH = "inference-header-content-length"
MAX_RANK, MAX_TENSORS = 32, 256
NO_REGIONS = Regions(allowed=False)


class WireError(ValueError):
    """A malformed request, with one sentence for the client."""


@dataclass(slots=True)
class InferRequest:
    """One inference request. `outputs`: the wanted outputs (None: all), and whether each is sent as binary data.
    `classes`: number of classes requested instead of an output's tensor; `places`: outputs to be written to shared
    memory.
    """

    model: str
    inputs: list[Tensor]
    version: str = ""
    id: str = ""
    outputs: dict[str, bool] | None = None
    binary_default: bool = False
    timeout_ms: float | None = None
    priority: int = 0
    classes: dict[str, int] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)


@dataclass(slots=True)
class InferAnswer:
    """The outputs of one inference, with the ms that it waited and executed, and the size of its batch."""

    model: str
    version: str
    outputs: list[Tensor] = field(default_factory=list)
    queued_ms: float = 0.0
    executed_ms: float = 0.0
    batch: int = 0


def _shape(raw: Any, name: str) -> tuple[int, ...]:
    if not isinstance(raw, list) or len(raw) > MAX_RANK:
        raise WireError(f"input {name!r} needs a shape: a list of at most {MAX_RANK} sizes")
    for size in raw:
        if type(size) is not int or size < 0 or size > 1 << 40:
            raise WireError(f"input {name!r} has {size!r} in its shape, which is not a valid size")
    return tuple(raw)


def _parameters(raw: dict[str, Any]) -> dict[str, Any]:
    found = raw.get("parameters")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise WireError("parameters must be an object")
    return found


def _inputs(raw: Any, binary: memoryview, regions: Regions) -> list[Tensor]:
    if not isinstance(raw, list) or not raw:
        raise WireError("inputs must be a list of tensors")
    if len(raw) > MAX_TENSORS:
        raise WireError(f"has {len(raw)} inputs; at most {MAX_TENSORS} are allowed")
    tensors, at = [], 0
    for entry in raw:
        if not isinstance(entry, dict):
            raise WireError("an input must be an object with name, shape, datatype and data")
        name, datatype = entry.get("name"), entry.get("datatype")
        if not isinstance(name, str) or not isinstance(datatype, str):
            raise WireError("an input needs a name and a datatype")
        shape = _shape(entry.get("shape"), name)
        parameters = _parameters(entry)
        size, place = parameters.get("binary_data_size"), regions.place(name, parameters)
        if entry.get("data") is not None and (place is not None or size is not None):
            other = "binary data" if place is None else "shared memory"
            raise WireError(f"input {name!r} has both a list of data and {other}; only one of them is allowed")
        if place is not None:
            tensors.append(placed(name, datatype, shape, place))
            continue
        if size is None:
            tensors.append(from_list(name, datatype, shape, entry.get("data")))
            continue
        if type(size) is not int or size < 0 or size > len(binary) - at:
            raise WireError(f"input {name!r}: binary_data_size {size!r} is not within the body")
        if datatype not in DTYPES:
            raise WireError(f"input {name!r} has the unknown data type {datatype!r}")
        tensor = Tensor(name, datatype, shape, binary[at : at + size])
        check_size(tensor)
        tensors.append(tensor)
        at += size
    if at != len(binary):
        raise WireError(f"has {len(binary) - at} bytes of binary data that belong to no input")
    return tensors


def placed(name: str, datatype: str, shape: tuple[int, ...], place: Place) -> Tensor:
    """Decode an input that is in shared memory."""
    if datatype not in DTYPES:
        raise WireError(f"input {name!r} has the unknown data type {datatype!r}")
    tensor = Tensor(name, datatype, shape, place.read())
    check_size(tensor)
    return tensor


def output_wishes(name: str, parameters: Mapping[str, Any], regions: Regions, request: InferRequest) -> None:
    """Enter into the request what an output's parameters ask for: classes, or a place in shared memory."""
    if count := wanted_classes(name, parameters):
        request.classes[name] = count
    if (place := regions.place(name, parameters)) is not None:
        request.places[name] = place


def _outputs(raw: Any, request: InferRequest, regions: Regions) -> dict[str, bool] | None:
    if raw is None or raw == []:
        return None
    if not isinstance(raw, list) or len(raw) > MAX_TENSORS:
        raise WireError("outputs must be a list of objects")
    wanted = {}
    for entry in raw:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise WireError("an output must be an object with a name")
        parameters = _parameters(entry)
        output_wishes(entry["name"], parameters, regions, request)
        wanted[entry["name"]] = bool(parameters.get("binary_data", request.binary_default))
    return wanted


def timeout_ms(parameters: dict[str, Any]) -> float | None:
    """The client's time limit in ms, from the parameter `timeout` (microseconds); None without that parameter."""
    value = parameters.get("timeout")
    if value is None or value == 0:
        return None
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise WireError("timeout must be a number of microseconds")
    return float(value) / 1000.0


def priority(parameters: dict[str, Any]) -> int:
    """Priority of a request, default 0: an integer, larger for more important."""
    value = parameters.get("priority", 0)
    if type(value) is not int:
        raise WireError("priority must be an integer")
    return value


def decode_request(
    model: str, version: str, body: Buffer, header_length: str | None, regions: Regions = NO_REGIONS
) -> InferRequest:
    """Decode an inference request. `header_length`: value of the HTTP header with the length of the JSON part, if
    binary data follows it."""
    view = memoryview(body)
    binary = view[len(view) :]
    if header_length is not None:
        if not (header_length.isascii() and header_length.isdigit()) or int(header_length) > len(view):
            raise WireError(f"{HEADER_LENGTH} {header_length[:20]!r} is not within the body")
        view, binary = view[: int(header_length)], view[int(header_length) :]
    try:
        raw = orjson.loads(view)
    except orjson.JSONDecodeError as error:
        raise WireError(f"not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise WireError("not an inference request: needs an object with inputs")
    name = raw.get("id", "")
    if not isinstance(name, str):
        raise WireError("id must be a string")
    parameters = _parameters(raw) if "parameters" in raw else {}
    default = bool(parameters.get("binary_data_output", False))
    request = InferRequest(model, [], version, name, None, default, timeout_ms(parameters), priority(parameters))
    try:
        request.inputs = _inputs(raw.get("inputs"), binary, regions)
        request.outputs = _outputs(raw.get("outputs"), request, regions)
    except TensorError as error:
        raise WireError(str(error)) from None
    return request


def _written(place: Place, tensor: Tensor) -> dict[str, Any]:
    try:
        return place.write(tensor.name, tensor.data)
    except TensorError as error:
        raise WireError(str(error)) from None


def encode_answer(request: InferRequest, answer: InferAnswer) -> tuple[bytes, int | None]:
    """Encode an answer: (body, length of its JSON part, or None if the body is JSON only). Raises WireError for values
    that JSON cannot represent.
    """
    outputs: list[dict[str, Any]] = []
    binary: list[Buffer] = []
    wanted = request.outputs
    for tensor in answer.outputs:
        as_binary = request.binary_default if wanted is None else wanted.get(tensor.name, False)
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        place = request.places.get(tensor.name)
        if place is not None:
            entry["parameters"] = _written(place, tensor)
        elif as_binary:
            entry["parameters"] = {"binary_data_size": len(tensor.data)}
            binary.append(tensor.data)
        else:
            try:
                entry["data"] = json_data(tensor)
            except TensorError as error:
                raise WireError(str(error)) from None
        outputs.append(entry)
    head: dict[str, Any] = {"model_name": answer.model, "model_version": answer.version}
    if request.id:
        head["id"] = request.id
    head["outputs"] = outputs
    text = orjson.dumps(head, option=orjson.OPT_SERIALIZE_NUMPY)
    if not binary:
        return text, None
    return b"".join((text, *binary)), len(text)
