"""Makes the contents of requests: random inputs that fit a server's models, and a number for each request.

The number is sent as the request's `id`, which the protocol's servers return in the answer. So an answer that belongs
to another request is detected.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import numpy as np

from cotenant.core.errors import InputError, WorkError
from cotenant.loadgen.grpc import ask_inputs
from cotenant.loadgen.target import Target
from cotenant.serving.protocol.oip import HEADER_LENGTH
from cotenant.serving.protocol.tensors import DTYPES, FREE_SIZE, Tensor, random_data

MAX_BYTES = 256 << 20


# the inputs of a model: (name, data type, shape with -1 for any size) of each
Form = tuple[tuple[str, str, tuple[int, ...]], ...]


def ask_form(target: Target, model: str) -> Form:
    """Return a model's inputs as its server reports them; InputError if the server does not have the model."""
    if target.is_grpc:
        return ask_inputs(target, model)
    status, content = target.ask(f"/v2/models/{quote(model, safe=':')}")
    if status in (401, 403):
        raise InputError(f"{target} requires a valid token (status {status}): give --token FILE", field="token")
    if status in (400, 404):
        known = ", ".join(ask_slos(target))
        raise InputError(f"{target} has no model {model!r}" + (f"; it has {known}" if known else ""), field="service")
    try:
        inputs = [(str(x["name"]), str(x["datatype"]), tuple(int(n) for n in x["shape"])) for x in content["inputs"]]
    except (KeyError, TypeError, ValueError):
        raise WorkError(f"{target} does not report the inputs of {model} (status {status})") from None
    return tuple(inputs)


def ask_slos(target: Target) -> dict[str, float]:
    """Return the SLOs in ms by service, if the server is a Cotenant server; otherwise empty."""
    if target.is_grpc:
        return {}
    try:
        status, content = target.ask("/cotenant/status")
    except WorkError:
        return {}
    if status != 200 or not isinstance(content, Mapping):
        return {}
    rows = content.get("services")
    return {
        str(row["name"]): float(row["slo_ms"])
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, Mapping) and "name" in row and isinstance(row.get("slo_ms"), int | float)
    }


def random_inputs(form: Form, batch: int, seed: int, sizes: Mapping[str, Sequence[int]] | None = None) -> list[Tensor]:
    """Return random tensors that fit a model's inputs. `sizes`: for an input, its whole shape or its shape without the
    first dimension, the batch. Without `sizes`, the first dimension is `batch` if the model allows any size there, and
    every other dimension of any size is FREE_SIZE."""
    rng = np.random.default_rng(seed)
    made = []
    for name, datatype, shape in form:
        if datatype not in DTYPES:
            raise InputError(f"input {name!r} has the unknown data type {datatype}", field="model")
        given = (sizes or {}).get(name)
        whole = _filled(name, shape, batch, given)
        count = math.prod(whole)
        if count * 16 > MAX_BYTES * 4:
            raise InputError(f"input {name!r} of shape {list(whole)} is too large to send", field="batch")
        made.append(Tensor(name, datatype, whole, random_data(datatype, count, rng)))
    return made


def _filled(name: str, shape: tuple[int, ...], batch: int, given: Sequence[int] | None) -> tuple[int, ...]:
    if given is not None:
        if len(given) != len(shape) - 1 and len(given) != len(shape):
            raise InputError(
                f"input {name!r} has {len(shape)} dimensions; {len(given)} sizes were given", field="shape"
            )
        return tuple(given) if len(given) == len(shape) else (batch, *given)
    if not shape:
        return ()
    first = batch if shape[0] < 0 else shape[0]
    return (first, *(FREE_SIZE if n < 0 else n for n in shape[1:]))


@dataclass
class Payload:
    """The requests of one service over HTTP. They differ only in the request's number; all other bytes are made once.
    `check`: an answer must contain the request's number and the model's name (answers of servers that return no id are
    assumed to be right)."""

    target: Target
    model: str
    inputs: list[Tensor]
    binary: bool = True
    check: bool = True
    deadline_ms: float | None = None
    prefix: str = ""
    _head: tuple[bytes, bytes] = field(init=False)

    def __post_init__(self) -> None:
        mark = "@@@@@@@@"
        tensors = []
        for x in self.inputs:
            entry: dict[str, Any] = {"name": x.name, "shape": list(x.shape), "datatype": x.datatype}
            if self.binary:
                entry["parameters"] = {"binary_data_size": len(x.data)}
            else:
                entry["data"] = _as_list(x)
            tensors.append(entry)
        content: dict[str, Any] = {"id": mark, "inputs": tensors}
        if self.binary:
            content["parameters"] = {"binary_data_output": True}
        text = json.dumps(content, separators=(",", ":")).encode()
        before, _, after = text.partition(mark.encode())
        raw = b"".join(bytes(x.data) for x in self.inputs) if self.binary else b""
        path = f"{self.target.prefix}/v2/models/{quote(self.model, safe=':')}/infer"
        lines = [f"POST {path} HTTP/1.1", f"Host: {self.target.authority}"]
        if self.target.token is not None:
            lines.append(f"Authorization: Bearer {self.target.token}")
        if self.deadline_ms is not None:
            lines.append(f"cotenant-deadline-ms: {self.deadline_ms:g}")
        size = len(text) - len(mark) + 8
        if self.binary:
            lines += ["Content-Type: application/octet-stream", f"{HEADER_LENGTH}: {size}"]
        else:
            lines.append("Content-Type: application/json")
        lines.append(f"Content-Length: {size + len(raw)}")
        self._head = ("\r\n".join(lines).encode() + b"\r\n\r\n" + before, after + raw)
        self._name = f'"model_name":{json.dumps(self.model)}'.encode()
        self._spaced = f'"model_name": {json.dumps(self.model)}'.encode()

    def request(self, index: int) -> bytes:
        """Return all bytes of request number `index`; the number has eight characters, so all requests have the same
        length.
        """
        return b"%b%08x%b" % (self._head[0], index & 0xFFFFFFFF, self._head[1])

    def belongs(self, index: int, body: bytes) -> bool:
        """Whether an answer belongs to this request."""
        if not self.check:
            return True
        if b'"id"' in body and b'"%08x"' % (index & 0xFFFFFFFF) not in body:
            return False
        return b'"model_name"' not in body or self._name in body or self._spaced in body


def _as_list(x: Tensor) -> list[Any]:
    if x.datatype == "BYTES":
        raise InputError(f"input {x.name!r} is text: send it with --format binary", field="format")
    values = np.frombuffer(x.data, DTYPES[x.datatype])
    if x.datatype == "BF16":
        raise InputError(f"input {x.name!r} is BF16: send it with --format binary", field="format")
    flat: list[Any] = values.astype(np.float64 if values.dtype.kind == "f" else values.dtype).tolist()
    return flat
