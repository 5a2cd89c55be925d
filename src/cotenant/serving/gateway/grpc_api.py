"""The Open Inference Protocol over gRPC: decodes requests and encodes answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from cotenant.serving.dispatch.calls import Kind, Refusal
from cotenant.serving.gateway import reflection
from cotenant.serving.gateway.http2_stream import INVALID, Handler, Slot
from cotenant.serving.gateway.management import NO_CUDA_MEMORY, Api
from cotenant.serving.protocol.messages import SERVICE, classes
from cotenant.serving.protocol.oip import (
    InferAnswer,
    InferRequest,
    WireError,
    output_wishes,
    placed,
    priority,
    timeout_ms,
)
from cotenant.serving.protocol.tensors import DTYPES, Tensor, TensorError, check_size, packed

# data type of the protocol -> field of InferTensorContents that has its values
_CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
_NO_RAW = "input {!r} has no raw contents, but others have"
_TOO_MANY_RAW = "there are more raw contents than inputs that need them"
# number of parsed request heads that are cached, and size in bytes above which a head is not cached
MOST_HEADS, MOST_HEAD = 1024, 4096


class GrpcApi:
    """Handlers of the gRPC methods, by path, for an Http2Front."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.messages = classes()
        self._request = self.messages["ModelInferRequest"]
        self._response = self.messages["ModelInferResponse"]
        self._heads: dict[bytes, InferRequest] = {}
        self._answers: dict[tuple[Any, ...], bytes] = {}

    def handlers(self) -> dict[bytes, Handler]:
        """Return the handlers of all gRPC methods, by path."""
        simple: dict[str, Callable[[Any], dict[str, Any]]] = {
            "ServerLive": lambda m: {"live": True},
            "ServerReady": lambda m: {"ready": not self.api.not_ready()},
            "ServerMetadata": lambda m: self.api.server_metadata(),
            "ModelReady": self._model_ready,
            "ModelMetadata": lambda m: self.api.model_metadata(m.name, m.version),
            "ModelConfig": lambda m: {"config": self.api.model_config(m.name, m.version)},
            "ModelStatistics": lambda m: self.api.statistics(m.name, m.version),
            "RepositoryIndex": lambda m: {"models": self.api.index(m.ready)},
            "SystemSharedMemoryStatus": lambda m: {"regions": {x["name"]: x for x in self.api.memory(m.name)}},
            "SystemSharedMemoryRegister": self._register,
            "SystemSharedMemoryUnregister": self._unregister,
            "CudaSharedMemoryStatus": lambda m: {},
            "CudaSharedMemoryRegister": self._register_cuda,
            "CudaSharedMemoryUnregister": lambda m: {},
        }
        found = {
            name: Handler(
                self._simple(name, answer), self.messages[f"{name}Request"],
                guarded=name not in ("ServerLive", "ServerReady"),
            )
            for name, answer in simple.items()
        }  # fmt: skip
        found["ModelInfer"] = Handler(self._infer)
        found["ModelStreamInfer"] = Handler(self._stream_infer, streaming=True)
        for verb, act in (("Load", self.api.load), ("Unload", self.api.unload)):
            found[f"RepositoryModel{verb}"] = Handler(
                self._repository(act), self.messages[f"RepositoryModel{verb}Request"]
            )
        paths = {f"{SERVICE}{name}".encode(): handler for name, handler in found.items()}
        return paths | reflection.handlers(found, lambda: not self.api.not_ready())

    # ---- everything except inference ----

    def _simple(self, name: str, answer: Callable[[Any], dict[str, Any]]) -> Callable[[Slot, Any], None]:
        response = self.messages[f"{name}Response"]

        def serve(slot: Slot, message: Any) -> None:
            try:
                content = answer(message)
            except Refusal as refusal:
                slot.fail(refusal.kind.value[1], refusal.message, refusal.retry_s)
                return
            slot.reply(response(**content).SerializeToString())

        return serve

    def _model_ready(self, message: Any) -> dict[str, Any]:
        try:
            self.api.model_info(message.name, message.version)
        except Refusal:  # clients poll this for unknown models, too, and would take an error for a broken server
            return {"ready": False}
        return {"ready": True}

    def _register(self, message: Any) -> dict[str, Any]:
        self.api.register_memory(message.name, message.key, message.offset, message.byte_size)
        return {}

    def _unregister(self, message: Any) -> dict[str, Any]:
        self.api.regions.unregister(message.name)
        return {}

    def _register_cuda(self, message: Any) -> dict[str, Any]:
        raise Refusal(Kind.WRONG, NO_CUDA_MEMORY)

    def _repository(self, act: Callable[[str, dict[str, Any]], Any]) -> Callable[[Slot, Any], None]:
        def serve(slot: Slot, message: Any) -> None:
            def done(refusal: Refusal | None) -> None:
                if refusal is None:
                    slot.reply(b"")
                else:
                    slot.fail(refusal.kind.value[1], refusal.message, refusal.retry_s)

            parameters = {key: _parameter(value) for key, value in message.parameters.items()}
            self.api.later(act(message.model_name, parameters), done)

        return serve

    # ---- inference ----

    def _infer(self, slot: Slot, data: bytes) -> None:
        try:
            request = self._decoded(data)
        except WireError as error:
            refusal = self._wrong(data, error)
            slot.fail(refusal.kind.value[1], refusal.message)
            return

        def reply(answer: InferAnswer | Refusal) -> None:
            if isinstance(answer, Refusal):
                slot.fail(answer.kind.value[1], answer.message, answer.retry_s)
            else:
                try:
                    slot.reply(self._encoded(request, answer))
                except TensorError as error:
                    slot.fail(INVALID, str(error))

        slot.withdraw = self.api.gateway.infer(request, reply)

    def _stream_infer(self, slot: Slot, data: bytes) -> None:
        """Answer a message of a bidirectional stream. Errors are reported in the answer to the message, and the stream
        continues.
        """
        answered = self.messages["ModelStreamInferResponse"]
        try:
            request = self._decoded(data)
        except WireError as error:
            slot.reply(answered(error_message=self._wrong(data, error).message).SerializeToString())
            return

        def reply(answer: InferAnswer | Refusal) -> None:
            try:
                if isinstance(answer, Refusal):
                    raise TensorError(answer.message)
                message = answered(infer_response=self._response.FromString(self._encoded(request, answer)))
            except TensorError as error:
                named = self._response(model_name=request.model, id=request.id)
                message = answered(error_message=str(error), infer_response=named)
            slot.reply(message.SerializeToString())

        slot.withdraw = self.api.gateway.infer(request, reply)

    def _wrong(self, data: bytes, error: WireError) -> Refusal:
        """Return the refusal of a request that cannot be decoded."""
        try:
            message = self._request.FromString(data)
        except DecodeError:
            return Refusal(Kind.WRONG, str(error))
        return self.api.gateway.wrong(message.model_name, message.model_version, str(error))

    def _decoded(self, data: bytes) -> InferRequest:
        """Decode a request. The part before its raw contents is identical for repeated requests, and is cached."""
        parts = split_raw(data)
        if parts is None:
            return self._parsed(data, None)
        end, spans = parts
        head = data[:end]
        # a head that names shared memory is not cached, because its decoding depends on which regions are registered
        if b"shared_memory_region" in head:
            return self._parsed(data, None)
        known = self._heads.get(head)
        if known is None:
            known = self._parsed(head, len(spans))
            if not known.id and len(head) <= MOST_HEAD:
                if len(self._heads) >= MOST_HEADS:
                    self._heads.clear()
                self._heads[head] = known
        if len(spans) < len(known.inputs):
            raise WireError(_NO_RAW.format(known.inputs[len(spans)].name))
        if len(spans) > len(known.inputs):
            raise WireError(_TOO_MANY_RAW)
        view = memoryview(data)
        tensors = []
        for blank, (start, stop) in zip(known.inputs, spans, strict=True):
            tensor = Tensor(blank.name, blank.datatype, blank.shape, view[start:stop])
            try:
                check_size(tensor)
            except TensorError as error:
                raise WireError(str(error)) from None
            tensors.append(tensor)
        return InferRequest(
            known.model, tensors, known.version, known.id, known.outputs, True, known.timeout_ms, known.priority,
            known.classes,
        )  # fmt: skip

    def _parsed(self, data: bytes, raws: int | None) -> InferRequest:
        """Decode a whole request. If the number of raw contents that follow is given, decode only the request's header:
        its tensors have no data.
        """
        try:
            message = self._request.FromString(data)
        except DecodeError:
            raise WireError("not an inference request") from None
        raw = message.raw_input_contents
        count = len(raw) if raws is None else raws
        if not message.inputs:
            raise WireError("needs inputs")
        parameters = _parameters(message.parameters)
        request = InferRequest(
            message.model_name, [], message.model_version, message.id,
            {entry.name: True for entry in message.outputs} or None, True, timeout_ms(parameters), priority(parameters),
        )  # fmt: skip
        regions, k = self.api.regions, 0
        try:
            for entry in message.inputs:
                place = regions.place(entry.name, _parameters(entry.parameters))
                if place is not None:
                    if entry.HasField("contents"):
                        raise WireError(f"input {entry.name!r} has typed contents beside shared memory")
                    request.inputs.append(placed(entry.name, entry.datatype, _shape(entry), place))
                    continue
                if count and k >= count:
                    raise WireError(_NO_RAW.format(entry.name))
                request.inputs.append(_tensor(entry, b"" if raws else raw[k] if count else None, whole=not raws))
                k += 1
            if k < count:
                raise WireError(_TOO_MANY_RAW)
            for entry in message.outputs:
                output_wishes(entry.name, _parameters(entry.parameters), regions, request)
        except TensorError as error:
            raise WireError(str(error)) from None
        return request

    def _encoded(self, request: InferRequest, answer: InferAnswer) -> bytes:
        """Encode a ModelInferResponse. The encoded header is cached for answers with the same shapes."""
        if request.places:
            return self._with_places(request, answer)
        outputs = answer.outputs
        key = (answer.model, answer.version, request.id, *((t.name, t.datatype, t.shape) for t in outputs))
        head = self._answers.get(key)
        if head is None:
            response = self._response(model_name=answer.model, model_version=answer.version, id=request.id)
            for tensor in outputs:
                response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            head = response.SerializeToString()
            if not request.id:
                if len(self._answers) >= MOST_HEADS:
                    self._answers.clear()
                self._answers[key] = head
        parts: list[Any] = [head]
        for tensor in outputs:
            parts += (b"\x32", _varint(len(tensor.data)), tensor.data)  # number 6 is the field raw_output_contents
        return b"".join(parts)

    def _with_places(self, request: InferRequest, answer: InferAnswer) -> bytes:
        """Encode an answer with some outputs in shared memory. Their raw contents are empty."""
        response = self._response(model_name=answer.model, model_version=answer.version, id=request.id)
        for tensor in answer.outputs:
            entry = response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            place = request.places.get(tensor.name)
            response.raw_output_contents.append(bytes(tensor.data) if place is None else b"")
            for key, value in ({} if place is None else place.write(tensor.name, tensor.data)).items():
                setattr(entry.parameters[key], "string_param" if isinstance(value, str) else "int64_param", value)
        data: bytes = response.SerializeToString()
        return data


RAW = 0x3A  # the tag of field 7, raw_input_contents


def split_raw(data: bytes) -> tuple[int, list[tuple[int, int]]] | None:
    """Find the raw contents of a ModelInferRequest: (end of the part before them, their positions). None unless the
    message ends with raw contents and has only length-delimited fields before them.
    """
    at, total = 0, len(data)
    end = -1
    spans = []
    while at < total:
        tag = data[at]
        if tag & 0x87 != 2 or (end >= 0 and tag != RAW):
            return None
        if tag == RAW and end < 0:
            end = at
        at += 1
        size = shift = 0
        while True:
            if at >= total or shift > 35:
                return None
            byte = data[at]
            at += 1
            size |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        if size > total - at:
            return None
        if end >= 0:
            spans.append((at, at + size))
        at += size
    return (end, spans) if spans else None


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _tensor(entry: Any, raw: bytes | None, whole: bool) -> Tensor:
    """Decode an input with raw or typed contents; if `whole`, check that they fit the input's datatype and shape."""
    name, datatype = entry.name, entry.datatype
    shape = _shape(entry)
    if datatype not in DTYPES:
        raise WireError(f"input {name!r} has the unknown data type {datatype!r}")
    if raw is None:
        field = _CONTENTS.get(datatype)
        if field is None:
            raise WireError(f"input {name!r}: {datatype} is possible as raw contents only")
        other = next((x.name for x, _ in entry.contents.ListFields() if x.name != field), None)
        if other is not None:
            raise WireError(f"input {name!r} is {datatype}: its contents must be in {field}, not in {other}")
        raw = packed(name, datatype, getattr(entry.contents, field))
    elif entry.HasField("contents"):
        raise WireError(f"input {name!r} has typed contents beside raw ones")
    tensor = Tensor(name, datatype, shape, raw)
    if whole:
        check_size(tensor)
    return tensor


def _shape(entry: Any) -> tuple[int, ...]:
    shape = tuple(entry.shape)
    if len(shape) > 32 or any(size < 0 for size in shape) or math.prod(shape) > 1 << 40:
        raise WireError(f"input {entry.name!r} has an invalid shape")
    return shape


def _parameters(found: Any) -> dict[str, Any]:
    return {key: _parameter(value) for key, value in found.items()} if found else {}


def _parameter(value: Any) -> Any:
    kind = value.WhichOneof("parameter_choice")
    return None if kind is None else getattr(value, kind)
