"""Requests over gRPC: Open Inference Protocol v2. Requests differ only in their id, so all other bytes are made
beforehand. Of an answer, only the model's name and the id are checked.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections import deque
from collections.abc import Sequence

from cotenant.core.errors import InputError, WorkError
from cotenant.core.http2 import literal
from cotenant.loadgen.http2 import Http2Client, Stream
from cotenant.loadgen.loop import DROPPED, FAILED, FULL, OK, Loop, reason_of
from cotenant.loadgen.target import ASK_WITHIN_S, Target
from cotenant.serving.protocol.messages import SERVICE, classes
from cotenant.serving.protocol.tensors import Tensor

CHANNELS, RECEIVE = 2, 1 << 16
INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, PERMISSION_DENIED = 3, 4, 5, 7
RESOURCE_EXHAUSTED, UNAVAILABLE, UNAUTHENTICATED = 8, 14, 16
OUTCOMES = {RESOURCE_EXHAUSTED: FULL, DEADLINE_EXCEEDED: DROPPED, UNAVAILABLE: DROPPED}


class GrpcPayload:
    """The ModelInferRequest of one service. Its bytes are made once, except for the id."""

    def __init__(
        self, model: str, inputs: Sequence[Tensor], check: bool = True, deadline_ms: float | None = None
    ) -> None:
        self.model, self.check = model, check
        request = classes()["ModelInferRequest"]
        self._answer = classes()["ModelInferResponse"]
        self._front: bytes = request(model_name=model).SerializeToString()
        back = request(raw_input_contents=[bytes(x.data) for x in inputs])
        for x in inputs:
            back.inputs.add(name=x.name, datatype=x.datatype, shape=x.shape)
        if deadline_ms is not None:
            # the protocol's unit of the timeout is microseconds
            back.parameters["timeout"].int64_param = round(deadline_ms * 1000)
        self._back: bytes = back.SerializeToString()

    def request(self, index: int) -> bytes:
        """Return the message of request number `index`. Field 3 is the id."""
        return self._front + b"\x1a\x08%08x" % (index & 0xFFFFFFFF) + self._back

    def belongs(self, index: int, answer: bytes) -> bool:
        """Whether an answer belongs to request number `index`; ValueError if it is not a protobuf message."""
        if not self.check:
            return True
        try:
            found = self._answer.FromString(answer)
        # the exception has one of protobuf's own classes, which are not known before protobuf is imported
        except Exception:
            raise ValueError("not a protobuf message") from None
        return found.model_name in ("", self.model) and found.id in ("", "%08x" % (index & 0xFFFFFFFF))


def header_block(target: Target, method: str) -> bytes:
    """Return the HTTP/2 headers of a gRPC call."""
    scheme = b"https" if target.scheme == "grpcs" else b"http"
    pairs = [
        (b":method", b"POST"), (b":scheme", scheme), (b":path", (SERVICE + method).encode()),
        (b":authority", target.authority.encode()), (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]  # fmt: skip
    if target.token is not None:
        pairs.append((b"authorization", f"Bearer {target.token}".encode()))
    return b"".join(literal(name, value) for name, value in pairs)


def envelope(message: bytes) -> bytes:
    """Frame a message for gRPC: a byte for "not compressed", then the message's length, then the message."""
    return b"\x00" + len(message).to_bytes(4, "big") + message


def connect(target: Target) -> socket.socket:
    """Connect a socket to the server, with TLS if the address asks for it. Raises OSError if the server refuses."""
    made = socket.create_connection((target.host, target.port), timeout=ASK_WITHIN_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if target.scheme == "grpcs":
        context = target.ssl_context()
        assert context is not None
        context.set_alpn_protocols(["h2"])
        made = context.wrap_socket(made, server_hostname=target.host)
    return made


def call(target: Target, method: str, message: bytes) -> tuple[int, str, bytes]:
    """Make one gRPC call and wait for its answer; return status, status message and answer. WorkError if there is no
    answer.
    """
    client = Http2Client()
    try:
        with connect(target) as channel:
            client.request(header_block(target, method), envelope(message))
            while True:
                channel.sendall(client.out)
                client.out.clear()
                data = channel.recv(1 << 16)
                ended = client.feed(data)
                if ended or not data:
                    break
    except (OSError, ValueError) as error:
        raise WorkError(f"cannot reach {target}: {getattr(error, 'strerror', None) or error}") from None
    if not ended or ended[0].error:
        raise WorkError(f"{target} gave no answer to {method}")
    headers = ended[0].headers
    text = headers.get(b"grpc-message", b"").decode(errors="replace")
    return int(headers.get(b"grpc-status", b"2") or 2), text, bytes(ended[0].data[5:])


def ask_inputs(target: Target, model: str) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Return a model's inputs, as its server reports them."""
    question = classes()["ModelMetadataRequest"](name=model).SerializeToString()
    status, text, answer = call(target, "ModelMetadata", question)
    if status in (NOT_FOUND, INVALID_ARGUMENT):
        raise InputError(f"{target} has no model {model!r}", field="service")
    if status in (UNAUTHENTICATED, PERMISSION_DENIED):
        raise InputError(f"{target} requires a valid token: give --token FILE", field="token")
    if status:
        raise WorkError(f"{target} does not report the inputs of {model}: {text or f'status {status}'}")
    found = classes()["ModelMetadataResponse"].FromString(answer)
    return tuple((x.name, x.datatype, tuple(x.shape)) for x in found.inputs)


class Channel:
    """One gRPC connection with many concurrent calls."""

    def __init__(self, owner: GrpcTransport) -> None:
        self.owner = owner
        self.client = Http2Client()
        self.socket = connect(owner.target)
        self.socket.setblocking(False)
        self.fd = self.socket.fileno()
        # number of a stream -> (index of the request, index of the service)
        self.calls: dict[int, tuple[int, int]] = {}
        self._waiting = False
        owner.loop.watch(self.fd, self.ready)

    def room(self) -> bool:
        """Whether another call may start on this connection."""
        return self.fd >= 0 and not self.client.going_away and len(self.calls) < self.client.most_streams

    def begin(self, index: int, svc: int, message: bytes) -> int:
        """Start a call on this connection; return the number of its stream."""
        stream = self.client.request(self.owner.block, envelope(message))
        self.calls[stream] = (index, svc)
        self.flush()
        return stream

    def flush(self) -> None:
        """Send as much of the connection's data as the kernel accepts; the rest is sent when the socket is writable
        again.
        """
        out = self.client.out
        try:
            while out:
                del out[: self.socket.send(out)]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError as error:
            self.owner.broken(self, error)
            return
        if bool(out) != self._waiting:
            self._waiting = bool(out)
            self.owner.loop.rewatch(self.fd, select.EPOLLIN | (select.EPOLLOUT if out else 0))

    def ready(self, events: int) -> None:
        """Handle the connection's socket when it is readable or writable."""
        while events & ~select.EPOLLOUT and self.fd >= 0:
            try:
                data = self.socket.recv(RECEIVE)
                ended = self.client.feed(data)
            except (BlockingIOError, ssl.SSLWantReadError):
                break
            except (OSError, ValueError) as error:
                self.owner.broken(self, error)
                return
            if not data:
                self.owner.broken(self, None)
                return
            for stream in ended:
                self.owner.ended(self, stream)
            if len(data) < RECEIVE and not isinstance(self.socket, ssl.SSLSocket):
                break
        if self.fd >= 0 and self.client.out:
            self.flush()

    def shut(self) -> None:
        """Close it."""
        self.owner.loop.unwatch(self.fd)
        self.fd = -1
        self.socket.close()


class GrpcTransport:
    """Sends calls over as few connections as the server's limit of concurrent calls allows. See Transport."""

    def __init__(self, target: Target, payloads: Sequence[GrpcPayload], most: int) -> None:
        self.target, self.payloads, self.most = target, payloads, most
        self.block = header_block(target, "ModelInfer")
        self.loop: Loop
        self.peak = 0
        self.channels: list[Channel] = []
        self.where: dict[int, tuple[Channel, int]] = {}
        self.waiting: deque[tuple[int, int]] = deque()

    def open(self, loop: Loop) -> None:
        self.loop = loop
        try:
            for _ in range(min(CHANNELS, self.most)):
                self._new()
        except OSError as error:
            raise WorkError(f"cannot reach {self.target}: {error.strerror or error}") from None

    def _new(self) -> Channel:
        made = Channel(self)
        made.flush()
        self.channels.append(made)
        self.peak = max(self.peak, len(self.channels))
        return made

    def send(self, index: int, svc: int) -> None:
        open_ones = [c for c in self.channels if c.room()]
        if open_ones:
            channel = min(open_ones, key=lambda c: len(c.calls))
        elif len(self.channels) < self.most:
            try:
                channel = self._new()
            except OSError as error:
                self.loop.finish(index, FAILED, reason=reason_of(error))
                return
        else:
            self.waiting.append((index, svc))
            return
        self.loop.sent(index)
        stream = channel.begin(index, svc, self.payloads[svc].request(index))
        if channel.fd >= 0:
            self.where[index] = (channel, stream)

    def ended(self, channel: Channel, stream: Stream) -> None:
        """Handle the answer of a call, whose stream has ended."""
        index, svc = channel.calls.pop(stream.number, (-1, 0))
        if index < 0 or self.where.pop(index, None) is None:
            self.loop.stray += 1
            return
        self._judge(index, svc, stream)
        if channel.client.going_away and not channel.calls:
            self._drop(channel)
        if self.waiting:
            self.send(*self.waiting.popleft())

    def _judge(self, index: int, svc: int, stream: Stream) -> None:
        headers = stream.headers
        status = int(headers.get(b"grpc-status", b"-1") or -1)
        if status == 0:
            if not self.payloads[svc].belongs(index, bytes(stream.data[5:])):
                self.loop.wrong += 1
                self.loop.finish(index, FAILED, reason="the answer belongs to another request or model")
                return
            took = headers.get(b"cotenant-executed-ms")
            self.loop.finish(index, OK, float(took) if took else -1.0)
            return
        outcome = OUTCOMES.get(status, FAILED)
        if headers.get(b"cotenant-outcome") in (b"unavailable", b"failed"):
            outcome = FAILED
        why = stream.error or f"gRPC status {status}"
        self.loop.finish(index, outcome, reason=why if outcome == FAILED else "")

    def broken(self, channel: Channel, error: Exception | None) -> None:
        """Handle the end of a connection: all its calls fail."""
        calls, channel.calls = channel.calls, {}
        self._drop(channel)
        for index, _ in calls.values():
            self.where.pop(index, None)
            self.loop.finish(index, FAILED, reason=reason_of(error))
        for _ in range(len(self.waiting)):
            self.send(*self.waiting.popleft())

    def _drop(self, channel: Channel) -> None:
        if channel in self.channels:
            self.channels.remove(channel)
        channel.shut()

    def expire(self, index: int) -> None:
        channel, stream = self.where.pop(index, (None, 0))
        if channel is None:
            self.waiting = deque(x for x in self.waiting if x[0] != index)
            return
        channel.calls.pop(stream, None)
        channel.client.cancel(stream)
        channel.flush()

    def close(self) -> None:
        for channel in self.channels:
            channel.shut()
        self.channels = []
