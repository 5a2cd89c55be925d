"""Requests over gRPC. Messages are built and read by hand from the protocol's field numbers: a request differs from the
next in its id alone, and of an answer only name and id are looked at.

Open Inference Protocol v2, service inference.GRPCInferenceService: ModelInferRequest {model_name 1, version 2, id 3,
inputs 5 {name 1, datatype 2, shape 3}, raw_input_contents 7}; ModelInferResponse {model_name 1, id 3}.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from cotenant.model.errors import InputError, WorkError
from cotenant.serve.load_loop import DROPPED, FAILED, FULL, OK, Loop
from cotenant.serve.load_payload import ASK_WITHIN_S, Target
from cotenant.serve.tensors import Tensor

SERVICE = "/inference.GRPCInferenceService/"
CHANNELS = 4  # one connection carries about a hundred calls at a time
_LIMITS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def varint(value: int) -> bytes:
    """A protobuf varint of a number of 0 or more (negative ones as 64-bit two's complement)."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, data: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a message; ValueError where it is not one."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(data) or shift > 63:
                raise ValueError("not a protobuf message")
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while at < len(data):
        key = number()
        kind = key & 7
        if kind == 0:
            yield key >> 3, number()
            continue
        size = {1: 8, 5: 4}.get(kind)
        if size is None:
            if kind != 2:
                raise ValueError("not a protobuf message")
            size = number()
        if at + size > len(data):
            raise ValueError("not a protobuf message")
        yield key >> 3, data[at : at + size]
        at += size


def encode_tensor(x: Tensor) -> bytes:
    """InferInputTensor, its data apart in raw_input_contents."""
    shape = b"".join(varint(n) for n in x.shape)
    return field(1, x.name.encode()) + field(2, x.datatype.encode()) + field(3, shape)


class GrpcPayload:
    """ModelInferRequest of one service, made once but for the id."""

    def __init__(
        self, model: str, inputs: Sequence[Tensor], check: bool = True, deadline_ms: float | None = None
    ) -> None:
        self.model, self.check = model, check
        self._front = field(1, model.encode())
        parameters = b""
        if deadline_ms is not None:  # parameters: map of name to InferParameter {int64_param 2}; microseconds
            value = varint(2 << 3) + varint(round(deadline_ms * 1000))
            parameters = field(4, field(1, b"timeout") + field(2, value))
        tensors = b"".join(field(5, encode_tensor(x)) for x in inputs)
        self._back = parameters + tensors + b"".join(field(7, bytes(x.data)) for x in inputs)

    def request(self, index: int) -> bytes:
        """The message of request number `index`."""
        return self._front + b"\x1a\x08%08x" % (index & 0xFFFFFFFF) + self._back

    def belongs(self, index: int, answer: bytes) -> bool:
        """Whether an answer is this request's."""
        if not self.check:
            return True
        model, number = self.model.encode(), b"%08x" % (index & 0xFFFFFFFF)
        for key, value in fields(answer):
            if (key == 1 and value != model) or (key == 3 and value and value != number):
                return False
            if key > 3:
                return True
        return True


def open_channel(target: Target) -> Any:
    """A connection of its own to the server."""
    import grpc

    # without a mark of its own a channel would share the connection of the one before
    options = [*_LIMITS, ("grpc.use_local_subchannel_pool", 1)]
    address = f"{target.host}:{target.port}"
    if target.scheme == "grpcs":
        roots = None
        if target.cafile is not None:
            try:
                with open(target.cafile, "rb") as file:
                    roots = file.read()
            except OSError as error:
                raise InputError(f"cannot read certificates: {error.strerror}", file=target.cafile) from None
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(roots), options)
    return grpc.insecure_channel(address, options)


def _metadata(target: Target) -> tuple[tuple[str, str], ...]:
    return () if target.token is None else (("authorization", f"Bearer {target.token}"),)


def ask_inputs(target: Target, model: str) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """A model's inputs: ModelMetadataRequest {name 1}; answer {inputs 4 {name 1, datatype 2, shape 3}}."""
    import grpc

    with open_channel(target) as channel:
        call = channel.unary_unary(SERVICE + "ModelMetadata")
        try:
            answer: bytes = call(field(1, model.encode()), timeout=ASK_WITHIN_S, metadata=_metadata(target))
        except grpc.RpcError as error:
            code = error.code()
            if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
                raise InputError(f"{target} has no model {model!r}", field="service") from None
            if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                raise InputError(f"{target} refuses the token; give one with --token", field="token") from None
            raise WorkError(f"cannot reach {target}: {code.name.lower()}") from None
    return tuple(_tensor_form(value) for key, value in fields(answer) if key == 4 and isinstance(value, bytes))


def _tensor_form(data: bytes) -> tuple[str, str, tuple[int, ...]]:
    name = datatype = ""
    shape: list[int] = []
    for key, value in fields(data):
        if key == 1 and isinstance(value, bytes):
            name = value.decode()
        elif key == 2 and isinstance(value, bytes):
            datatype = value.decode()
        elif key == 3:
            shape += [value] if isinstance(value, int) else _varints(value)
    return name, datatype, tuple(n - (1 << 64) if n >> 63 else n for n in shape)


def _varints(data: bytes) -> list[int]:
    out, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            out.append(value)
            value = shift = 0
    return out


class GrpcTransport:
    """Calls on a few channels. Answers come on grpc's own threads, which note the time and wake the loop."""

    def __init__(self, target: Target, payloads: Sequence[GrpcPayload], timeout_s: float) -> None:
        self.target, self.payloads, self.timeout_s = target, payloads, timeout_s
        self.loop: Loop
        self.peak = CHANNELS
        self._channels: list[Any] = []
        self._calls: list[Any] = []
        self._running: dict[int, Any] = {}
        self._ended: deque[tuple[int, int, float, Any]] = deque()
        self._signal = os.eventfd(0, os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._woken = False

    def open(self, loop: Loop) -> None:
        """See Transport; WorkError when the server cannot be reached."""
        import grpc

        self.loop = loop
        self._codes = {
            grpc.StatusCode.OK: OK,
            grpc.StatusCode.RESOURCE_EXHAUSTED: FULL,
            grpc.StatusCode.DEADLINE_EXCEEDED: DROPPED,
            grpc.StatusCode.UNAVAILABLE: DROPPED,
        }
        for _ in range(CHANNELS):
            channel = open_channel(self.target)
            try:
                grpc.channel_ready_future(channel).result(timeout=ASK_WITHIN_S)
            except grpc.FutureTimeoutError:
                raise WorkError(f"cannot reach {self.target}") from None
            self._channels.append(channel)
            self._calls.append(channel.unary_unary(SERVICE + "ModelInfer"))
        self._metadata = _metadata(self.target)
        loop.watch(self._signal, self._ready)

    def send(self, index: int, svc: int) -> None:
        """See Transport."""
        call = self._calls[index % CHANNELS].future(
            self.payloads[svc].request(index), timeout=self.timeout_s + 1, metadata=self._metadata
        )
        self._running[index] = call
        self.loop.sent(index)
        call.add_done_callback(lambda done: self._end(index, svc, done))

    def _end(self, index: int, svc: int, call: Any) -> None:
        at = time.monotonic() - self.loop.began
        with self._lock:
            self._ended.append((index, svc, at, call))
            if self._woken:
                return
            self._woken = True
        try:
            os.eventfd_write(self._signal, 1)
        except OSError:
            return  # the run is over

    def _ready(self, events: int) -> None:
        os.eventfd_read(self._signal)
        with self._lock:
            ended, self._ended = self._ended, deque()
            self._woken = False
        for index, svc, at, call in ended:
            if self._running.pop(index, None) is not None:
                self._judge(index, svc, at, call)

    def _judge(self, index: int, svc: int, at: float, call: Any) -> None:
        outcome = self._codes.get(call.code(), FAILED)
        if outcome == OK:
            if not self.payloads[svc].belongs(index, call.result()):
                self.loop.wrong += 1
                self.loop.finish(index, FAILED, reason="the answer belongs to another request or model")
                return
            took = next((v for k, v in call.trailing_metadata() or () if k == "cotenant-executed-ms"), None)
            self.loop.finish(index, OK, float(took) if took is not None else -1.0, at=at)
            return
        named = next((v for k, v in call.trailing_metadata() or () if k == "cotenant-outcome"), None)
        if named in ("unavailable", "failed") or (named is None and "connect" in (call.details() or "").lower()):
            outcome = FAILED
        self.loop.finish(index, outcome, reason=call.code().name.lower() if outcome == FAILED else "", at=at)

    def expire(self, index: int) -> None:
        """See Transport."""
        call = self._running.pop(index, None)
        if call is not None:
            call.cancel()

    def close(self) -> None:
        """See Transport."""
        for channel in self._channels:
            channel.close()
        self.loop.unwatch(self._signal)
        os.close(self._signal)
