"""Every data type at its extremes, by both doors and in both encodings of each: what comes back is what was sent."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from identity_models import FIELDS, MOST, VALUES, identities
from serve_setup import ask, plan
from server_thread import Running, running

from cotenant.serving.protocol.messages import classes
from cotenant.serving.protocol.tensors import DTYPES, pack_strings, unpack_strings

pytest.importorskip("onnx")
grpc = pytest.importorskip("grpc")

DOORS = ("json", "binary", "typed", "raw")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    content = identities(tmp_path_factory.mktemp("exact"))
    with running(content, plan=plan(dict.fromkeys([*VALUES, "pair"], 8)), grpc="127.0.0.1:0") as found:
        yield found


def wire(datatype: str, values: list[Any]) -> bytes:
    """Elements as binary data has them."""
    if datatype == "BYTES":
        return pack_strings(x if isinstance(x, bytes) else x.encode() for x in values)
    codes = {"BOOL": "?", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b", "INT16": "h",
             "INT32": "i", "INT64": "q", "FP16": "e", "FP32": "f", "FP64": "d"}  # fmt: skip
    return struct.pack(f"<{len(values)}{codes[datatype]}", *values)


def over_http(server: Running, datatype: str, data: list[Any] | bytes, count: int, binary_out: bool) -> Any:
    """(status, bytes of the answer's tensor, or the sentence)."""
    entry: dict[str, Any] = {"name": "x", "shape": [1, count], "datatype": datatype}
    headers, tail = {}, b""
    if isinstance(data, bytes):
        entry["parameters"], tail = {"binary_data_size": len(data)}, data
    else:
        entry["data"] = data
    body = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": binary_out}}).encode()
    if tail:
        headers["Inference-Header-Content-Length"] = str(len(body))
    status, got, answer = ask(server.http_url, f"/v2/models/{datatype}/infer", body + tail, headers=headers)
    if status != 200:
        return status, answer["error"]
    if isinstance(answer, bytes):
        return status, answer[int(got["inference-header-content-length"]) :]
    return status, wire(datatype, answer["outputs"][0]["data"])


def over_grpc(server: Running, datatype: str, values: list[Any] | None, raw: list[bytes], **more: Any) -> Any:
    kinds = classes()
    message = kinds["ModelInferRequest"](model_name=datatype, raw_input_contents=raw)
    count = more["count"] if "count" in more else len(values or ())
    entry = message.inputs.add(name="x", datatype=datatype, shape=[1, count])
    if values is not None:
        getattr(entry.contents, more.get("field", FIELDS.get(datatype, ""))).extend(values)
    with grpc.insecure_channel(server.grpc_address) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer", request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=kinds["ModelInferResponse"].FromString,
        )  # fmt: skip
        try:
            return 200, call(message).raw_output_contents[0]
        except grpc.RpcError as error:
            return 400 if error.code() is grpc.StatusCode.INVALID_ARGUMENT else 500, error.details()


def sent(server: Running, door: str, datatype: str, values: list[Any]) -> Any:
    data = wire(datatype, values)
    if door == "json":
        return over_http(server, datatype, values, len(values), False)
    if door == "binary":
        return over_http(server, datatype, data, len(values), True)
    if door == "raw":
        return over_grpc(server, datatype, None, [data], count=len(values))
    return over_grpc(server, datatype, [x.encode() for x in values] if datatype == "BYTES" else values, [])


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("datatype", VALUES)
def test_extremes_come_back_exactly(server: Running, datatype: str, door: str) -> None:
    if (datatype, door) == ("FP16", "typed"):
        status, why = over_grpc(server, "FP16", [1.0], [], field="fp32_contents")
        assert (status, why) == (400, "input 'x': FP16 is possible as raw contents only")
        return
    assert sent(server, door, datatype, VALUES[datatype]) == (200, wire(datatype, VALUES[datatype]))


@pytest.mark.parametrize("door", DOORS)
def test_bytes_that_are_no_text_are_refused_where_strings_are_text(server: Running, door: str) -> None:
    photo = b"\xff\xd8\xff\xe0"
    if door == "json":  # JSON can only carry text
        return
    if door == "binary":
        status, why = over_http(server, "BYTES", pack_strings([photo]), 1, True)
    elif door == "raw":
        status, why = over_grpc(server, "BYTES", None, [pack_strings([photo])], count=1)
    else:
        status, why = over_grpc(server, "BYTES", [photo], [])
    assert (status, why) == (400, "input 'x' has bytes that are not UTF-8, but the model's strings are text")


@pytest.mark.parametrize("door", ["binary", "typed", "raw"])
@pytest.mark.parametrize("datatype", ["FP16", "FP32", "FP64"])
def test_infinities_and_nans_come_back(server: Running, datatype: str, door: str) -> None:
    if (datatype, door) != ("FP16", "typed"):
        values = [math.inf, -math.inf, math.nan]
        assert sent(server, door, datatype, values) == (200, wire(datatype, values))


def test_what_json_cannot_carry_is_said(server: Running) -> None:
    status, why = over_http(server, "FP32", wire("FP32", [1.0, math.nan]), 2, False)
    assert status == 400
    assert why == (
        "output 'y' has elements that are infinite or NaN, which JSON cannot represent: request it as binary data"
    )


@pytest.mark.parametrize(
    ("datatype", "values", "said"),
    [
        ("BOOL", [1], "not BOOL"), ("BOOL", [True, 0], "not BOOL"), ("UINT8", [256], "outside UINT8"),
        ("UINT8", [-1], "outside UINT8"), ("UINT16", [65536], "outside UINT16"), ("UINT32", [2**32], "outside UINT32"),
        ("UINT32", [-1], "outside UINT32"), ("UINT64", [-1], "outside UINT64"), ("UINT64", [MOST + 1], "not UINT64"),
        ("INT8", [128], "outside INT8"), ("INT16", [-32769], "outside INT16"), ("INT32", [2**31], "outside INT32"),
        ("INT64", [2**63], "outside INT64"), ("INT64", [MOST, -1], "outside INT64"), ("INT32", [1, True], "not INT32"),
        ("INT32", [1.0], "not INT32"), ("INT64", ["1"], "not INT64"), ("FP32", [1.0, True], "not FP32"),
        ("FP64", [None], "not FP64"), ("FP16", [65520.0], "outside FP16"), ("FP32", [3.5e38], "outside FP32"),
        ("BYTES", [1], "not BYTES"), ("UINT8", [[1, 2], 3], "not a rectangular list"),
    ],
)  # fmt: skip
def test_json_that_a_type_cannot_hold(server: Running, datatype: str, values: list[Any], said: str) -> None:
    status, why = over_http(server, datatype, values, len(values), False)
    assert status == 400
    assert said in why


@pytest.mark.parametrize(
    ("datatype", "values", "field", "said"),
    [
        ("UINT8", [256], "uint_contents", "outside UINT8"), ("UINT16", [65536], "uint_contents", "outside UINT16"),
        ("INT8", [-129], "int_contents", "outside INT8"), ("INT16", [32768], "int_contents", "outside INT16"),
        ("FP32", [1.0], "fp64_contents", "in fp32_contents, not in fp64_contents"),
        ("UINT64", [1], "uint_contents", "in uint64_contents, not in uint_contents"),
    ],
)  # fmt: skip
def test_typed_contents_that_a_type_cannot_hold(
    server: Running, datatype: str, values: list[Any], field: str, said: str
) -> None:
    status, why = over_grpc(server, datatype, values, [], field=field)
    assert status == 400
    assert said in why


def test_an_input_has_one_encoding(server: Running) -> None:
    status, why = over_grpc(server, "INT32", [1], [wire("INT32", [2])])
    assert (status, why) == (400, "input 'x' has typed contents beside raw ones")
    status, why = over_grpc(server, "BOOL", None, [b"\x02"], count=1)
    assert (status, why) == (400, "input 'x' is BOOL: its bytes must be 0 or 1")


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("datatype", VALUES)
def test_wrong_lengths_are_refused(server: Running, datatype: str, door: str) -> None:
    values, count = VALUES[datatype], len(VALUES[datatype])
    data = wire(datatype, values)
    for wrong in (data[:-1], data + b"\0", b""):
        if door == "binary" and wrong:
            status, why = over_http(server, datatype, wrong, count, True)
        elif door == "raw":
            status, why = over_grpc(server, datatype, None, [wrong], count=count)
        else:
            continue
        assert (status, why.startswith(("input 'x' has ", "a BYTES tensor ends inside "))) == (400, True), why
    for few in (values[:-1], values + values[:1], []):
        if door == "json":
            status, why = over_http(server, datatype, few, count, False)
        elif door == "typed" and datatype in FIELDS:
            given = [x.encode() for x in few] if datatype == "BYTES" else few
            status, why = over_grpc(server, datatype, given, [], count=count)
        else:
            continue
        assert (status, why.startswith("input 'x' has ")) == (400, True), why


def pair(server: Running, *rows: tuple[str, str, list[Any]], raw: Sequence[bytes] = ()) -> Any:
    """(field or nothing, type, values) of x and x1 in one gRPC request: the answer's contents, or a refusal."""
    kinds = classes()
    message = kinds["ModelInferRequest"](model_name="pair", raw_input_contents=raw)
    for name, (field, datatype, values) in zip(("x", "x1"), rows, strict=False):
        entry = message.inputs.add(name=name, datatype=datatype, shape=[1, 2])
        if field:
            getattr(entry.contents, field).extend(values)
    with grpc.insecure_channel(server.grpc_address) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer", request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=kinds["ModelInferResponse"].FromString,
        )  # fmt: skip
        try:
            return list(call(message).raw_output_contents)
        except grpc.RpcError as error:
            return error.code().name, error.details()


def test_raw_contents_are_counted(server: Running) -> None:
    """Also those of a request that begins like an earlier one, whose description the server has kept."""
    floats, numbers = [1.0, 2.0], [2**53 + 1, -(2**63)]
    a, b = wire("FP32", floats), wire("INT64", numbers)
    blank = ("", "FP32", floats), ("", "INT64", numbers)
    typed = ("fp32_contents", "FP32", floats), ("int64_contents", "INT64", numbers)
    invalid = "INVALID_ARGUMENT"
    for _ in range(2):
        assert pair(server, *blank, raw=[a]) == (invalid, "input 'x1' has no raw contents, but others have")
        too_many = (invalid, "there are more raw contents than inputs that need them")
        assert pair(server, *blank, raw=[a, b, a]) == too_many
        assert pair(server, *blank, raw=[a, b]) == [a, b]
    assert pair(server, *typed) == [a, b]
    assert pair(server, blank[0], typed[1], raw=[a]) == (invalid, "input 'x1' has no raw contents, but others have")
    assert pair(server, typed[0], blank[1], raw=[b]) == (invalid, "input 'x' has typed contents beside raw ones")
    assert pair(server, typed[0]) == (invalid, "the model takes 2 inputs (x, x1); got 1 (x)")
    assert pair(server, *blank) == (invalid, "input 'x' has 0 bytes; its shape and type say 8")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": None}, "an input needs a name and a datatype"),
        ({"datatype": None}, "an input needs a name and a datatype"),
        ({"datatype": "fp32"}, "input 'x' has the unknown data type 'fp32'"),
        ({"shape": None}, "input 'x' needs a shape: a list of at most 32 sizes"),
        ({"shape": [True, 2]}, "input 'x' has True in its shape, which is not a valid size"),
        ({"data": None}, "input 'x' needs its data as a list"),
        ({"name": "z"}, "input 'x' is missing"),
        (
            {"parameters": {"binary_data_size": 8}},
            "input 'x' has both a list of data and binary data; only one of them is allowed",
        ),
    ],
)
def test_what_a_request_lacks_is_named(server: Running, change: dict[str, Any], said: str) -> None:
    entry = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]} | change
    body = json.dumps({"inputs": [{k: v for k, v in entry.items() if v is not None}]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(body))}
    tail = wire("FP32", [3.0, 4.0]) if "parameters" in change else b""
    status, _, answer = ask(server.http_url, "/v2/models/FP32/infer", body + tail, headers=headers)
    assert (status, answer["error"]) == (400, said)


def test_bf16_travels_as_binary_data_only() -> None:
    from cotenant.serving.protocol.tensors import Tensor, TensorError, from_list, json_data

    with pytest.raises(TensorError, match="BF16 must be sent as binary data"):
        from_list("x", "BF16", (1,), [1.0])
    with pytest.raises(TensorError, match="BF16 elements, which JSON cannot represent"):
        json_data(Tensor("y", "BF16", (1,), b"\x80\x3f"))
    assert unpack_strings(pack_strings([b"\xff\xd8\xff\xe0", b""])) == [b"\xff\xd8\xff\xe0", b""]
    assert set(VALUES) | {"BF16"} == set(DTYPES)
