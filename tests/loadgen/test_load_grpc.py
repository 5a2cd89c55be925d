"""The load generator's own gRPC client against the reference implementation of gRPC, and against our server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.errors import InputError, WorkError
from cotenant.core.http2 import FIRST_WINDOW, frame, literal
from cotenant.loadgen.grpc import SERVICE, GrpcPayload
from cotenant.loadgen.http2 import Http2Client
from cotenant.loadgen.result import LoadResult
from cotenant.loadgen.run import LoadTest, run_here
from cotenant.loadgen.schedule import parse_service
from cotenant.loadgen.target import parse_target
from cotenant.serving.protocol.messages import classes
from cotenant.serving.protocol.tensors import Tensor
from cotenant.workloads.requests.arrivals import parse_arrivals

grpc = pytest.importorskip("grpc")
Behave = Callable[[Any, Any], bytes]


def answer(model: str, number: str, data: bytes = b"") -> bytes:
    made = classes()["ModelInferResponse"](model_name=model, id=number, raw_output_contents=[data])
    return bytes(made.SerializeToString())


def echo(request: Any, context: Any) -> bytes:
    return answer(request.model_name, request.id, b"x" * 40)


@contextlib.contextmanager
def reference_server(behave: Behave, sizes: int = 4) -> Iterator[str]:
    """A server by the grpc library: model `a` with one FP32 input [-1, sizes]."""

    def metadata(message: bytes, context: Any) -> bytes:
        if classes()["ModelMetadataRequest"].FromString(message).name != "a":
            context.abort(grpc.StatusCode.NOT_FOUND, "no such model")
        tensor = {"name": "X", "datatype": "FP32", "shape": [-1, sizes]}
        return bytes(classes()["ModelMetadataResponse"](name="a", inputs=[tensor]).SerializeToString())

    def infer(message: bytes, context: Any) -> bytes:
        return behave(classes()["ModelInferRequest"].FromString(message), context)

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            found = {SERVICE + "ModelMetadata": metadata, SERVICE + "ModelInfer": infer}.get(details.method)
            return found and grpc.unary_unary_rpc_method_handler(found)

    server = grpc.server(futures.ThreadPoolExecutor(16), options=[("grpc.max_receive_message_length", -1)])
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        server.stop(0.2).wait()


def send(url: str, rate: float = 100, slo_ms: float | None = None, **more: Any) -> LoadResult:
    service = replace(parse_service(f"a={rate:g}", parse_arrivals("constant")), slo_ms=slo_ms)
    return run_here(replace(LoadTest(parse_target(url), (service,), 1.0), **more))


def counts(result: LoadResult) -> tuple[int, int, int, int, int]:
    row = result.summary()["services"]["a"]
    return row["sent"], row["ok"], row["late"], row["dropped"], row["failed"]


def test_the_reference_server_answers_every_call() -> None:
    ids: list[str] = []

    def behave(request: Any, context: Any) -> bytes:
        ids.append(request.id)
        return echo(request, context)

    with reference_server(behave) as url:
        result = send(url, 300)
    assert counts(result) == (300, 300, 0, 0, 0)
    assert len(set(ids)) == 300
    assert 2 <= result.connections < 100  # each stream window that opens late needs one more connection


def test_statuses_are_told_apart() -> None:
    codes = ["RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED"]

    def behave(request: Any, context: Any) -> bytes:
        number = int(request.id, 16)
        if number < len(codes):
            context.abort(getattr(grpc.StatusCode, codes[number]), "as asked")
        if number == 5:
            time.sleep(2.6)
        if number == 6:
            return answer("b", request.id)
        if number == 7:
            return answer("a", "00000000")
        if number == 8:
            context.set_trailing_metadata((("cotenant-executed-ms", "2.5"),))
        return echo(request, context)

    with reference_server(behave) as url:
        result = send(url, 10, slo_ms=2500.0)
    assert counts(result) == (10, 2, 1, 3, 4)
    assert result.wrong == 2
    assert result.rows["inference"].max() == 2.5


def test_bodies_beyond_every_window_arrive_whole() -> None:
    """4 MB a call is 64 windows of a connection: the client has to wait for the server to open them again."""
    sizes = 1_000_000

    def behave(request: Any, context: Any) -> bytes:
        assert len(request.raw_input_contents[0]) == 4 * sizes
        return echo(request, context)

    with reference_server(behave, sizes) as url:
        result = send(url, 12)
    assert counts(result) == (12, 12, 0, 0, 0)


def test_a_call_without_an_answer_fails_alone() -> None:
    def behave(request: Any, context: Any) -> bytes:
        if int(request.id, 16) == 3:
            time.sleep(4.0)
        return echo(request, context)

    with reference_server(behave) as url:
        result = send(url, 20, timeout_s=2.5)
    assert counts(result) == (20, 19, 0, 0, 1), result.reasons


def test_a_server_that_goes_away_fails_what_is_open_and_no_more() -> None:
    with reference_server(echo) as url:
        first = send(url, 50)
        assert counts(first)[1] == 50
    with pytest.raises(WorkError, match="cannot reach grpc://"):
        send(url)


def test_an_unknown_model_is_wrong_input() -> None:
    with reference_server(echo) as url, pytest.raises(InputError, match="no model 'z'"):
        run_here(LoadTest(parse_target(url), (parse_service("z=10", parse_arrivals("constant")),), 1.0))


def test_our_server_answers_over_grpc() -> None:
    from server_thread import running

    services = {
        "gpus": {"count": 1, "model": "RTX2080Ti"},
        "backend": "timed",
        "services": [{"name": "a", "model": "lenet1", "rate_rps": 100, "slo_ms": 20_000}],
    }
    with running(services, http=None, grpc="127.0.0.1:0") as server:
        result = send(f"grpc://{server.grpc_address}", 100, slo_ms=20_000.0)
    assert counts(result) == (100, 100, 0, 0, 0)


def test_what_is_not_http2_is_said() -> None:
    client = Http2Client()
    with pytest.raises(ValueError, match="not HTTP/2"):
        client.feed(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_windows_hold_back_and_let_go() -> None:
    client = Http2Client()
    client.out.clear()
    body = bytes(FIRST_WINDOW + 10)
    stream = client.request(literal(b"a", b"b"), body)
    sent = sum(len(x) for kind, _, x in frames(bytes(client.out)) if kind == 0)
    assert sent == FIRST_WINDOW
    client.out.clear()
    client.feed(frame(8, 0, 0, (100).to_bytes(4, "big")))
    assert not client.out  # a larger window of the connection does not open the window of the stream
    client.feed(frame(8, 0, stream, (4).to_bytes(4, "big")))
    client.feed(frame(8, 0, stream, (100).to_bytes(4, "big")))
    rest = [(flags, len(x)) for kind, flags, x in frames(bytes(client.out)) if kind == 0]
    assert rest == [(0, 4), (1, 6)]


def frames(data: bytes) -> list[tuple[int, int, bytes]]:
    found, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 3], "big")
        found.append((data[at + 3], data[at + 4], data[at + 9 : at + 9 + size]))
        at += 9 + size
    return found


@given(st.binary(max_size=400), st.integers(1, 30))
def test_answers_may_come_in_any_pieces(payload: bytes, piece: int) -> None:
    client = Http2Client()
    stream = client.request(literal(b"a", b"b"), b"")
    whole = (
        frame(4, 0, 0)
        + frame(1, 4, stream, literal(b":status", b"200"))
        + frame(0, 0, stream, payload)
        + frame(6, 0, 0, bytes(8))
        + frame(1, 5, stream, literal(b"grpc-status", b"0"))
    )
    ended = [s for at in range(0, len(whole), piece) for s in client.feed(whole[at : at + piece])]
    assert [(s.number, bytes(s.data), s.headers[b"grpc-status"]) for s in ended] == [(stream, payload, b"0")]


@given(st.binary(max_size=60))
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    """What protobuf reads is the request's or not; what it does not read is a ValueError."""
    message = classes()["ModelInferResponse"]
    try:
        expected = message.FromString(data).id in ("", "00000001")
    except Exception:
        with pytest.raises(ValueError, match="not a protobuf message"):
            GrpcPayload("", []).belongs(1, data)
        return
    assert GrpcPayload(message.FromString(data).model_name, []).belongs(1, data) is expected


def test_an_answer_belongs_to_the_request_of_its_model_and_id() -> None:
    payload = GrpcPayload("m", [])
    assert payload.belongs(0xAB, answer("m", "000000ab"))
    assert payload.belongs(0xAB, answer("m", "")), "a server need not repeat the id"
    assert not payload.belongs(0xAB, answer("m", "000000ac"))
    assert not payload.belongs(0xAB, answer("n", "000000ab"))
    assert GrpcPayload("m", [], check=False).belongs(0xAB, answer("n", ""))


def test_a_request_holds_what_the_protocol_asks_for() -> None:
    message = GrpcPayload("m", [Tensor("X", "FP32", (1, 2), bytes(8))], deadline_ms=5).request(0xAB)
    found = classes()["ModelInferRequest"].FromString(message)
    assert (found.model_name, found.id, list(found.raw_input_contents)) == ("m", "000000ab", [bytes(8)])
    (tensor,) = found.inputs
    assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("X", "FP32", [1, 2])
    assert {name: value.int64_param for name, value in found.parameters.items()} == {"timeout": 5000}
