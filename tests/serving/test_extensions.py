"""Extensions of the protocol by both ports: statistics, classification, shared memory; gRPC's health and reflection."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serve_setup import ask, deployment, plan
from server_thread import Running, running

from cotenant.serving.protocol.messages import classes
from cotenant.serving.protocol.tensors import unpack_strings

onnx = pytest.importorskip("onnx")
grpc = pytest.importorskip("grpc")

SERVICE = "/inference.GRPCInferenceService/"
ROWS = np.array([[0.1, 0.7, 0.2], [0.5, -1.0, 0.5]], np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Service `a` gives back its rows; the first two of three classes have labels."""
    folder = tmp_path_factory.mktemp("extensions")
    model = folder / "m"
    (model / "1").mkdir(parents=True)
    sides = [onnx.helper.make_tensor_value_info(x, onnx.TensorProto.FLOAT, ["n", 3]) for x in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "g", sides[:1], sides[1:])
    made = onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 13)])
    onnx.save(made, model / "1" / "model.onnx")
    (model / "labels.txt").write_text("cat\ndog\n")
    (model / "config.pbtxt").write_text(
        'max_batch_size: 8 output { name: "y" data_type: TYPE_FP32 dims: 3 label_filename: "labels.txt" }'
    )
    services = [{"name": "a", "model": str(model), "backend": "onnx", "slo_ms": 20_000}]
    with running(
        deployment(services, folder) | {"mechanism": "cores"}, plan=plan({"a": 8}), grpc="127.0.0.1:0"
    ) as found:
        yield found


def post(server: Running, path: str, body: Any, **more: Any) -> Any:
    return ask(server.http_url, f"/v2/{path}", body, "POST", **more)


def infer_json(server: Running, entry: dict[str, Any], output: dict[str, Any]) -> Any:
    given = {"name": "x", "shape": [2, 3], "datatype": "FP32"} | entry
    return post(server, "models/a/infer", {"inputs": [given], "outputs": [{"name": "y", "parameters": output}]})


def call(server: Running, method: str, response: str = "", **content: Any) -> Any:
    kinds = classes()
    request = kinds[f"{method}Request"](**content)
    with grpc.insecure_channel(server.grpc_address) as channel:
        return channel.unary_unary(
            SERVICE + method, request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=kinds[f"{response or method}Response"].FromString,
        )(request)  # fmt: skip


def infer_message(**parameters: Any) -> Any:
    message = classes()["ModelInferRequest"](model_name="a")
    message.inputs.add(name="x", datatype="FP32", shape=[2, 3])
    wanted = message.outputs.add(name="y")
    for key, value in parameters.items():
        setattr(wanted.parameters[key], "string_param" if isinstance(value, str) else "int64_param", value)
    return message


def infer_grpc(server: Running, message: Any) -> Any:
    with grpc.insecure_channel(server.grpc_address) as channel:
        return channel.unary_unary(
            f"{SERVICE}ModelInfer", request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=classes()["ModelInferResponse"].FromString,
        )(message)  # fmt: skip


@pytest.mark.parametrize(("name", "version", "said"), [("b", "", "no model 'b'"), ("a", "9", "no version '9'")])
def test_an_unknown_model_is_named_before_what_else_is_wrong(
    server: Running, name: str, version: str, said: str
) -> None:
    path = f"models/{name}/versions/{version}/infer" if version else f"models/{name}/infer"
    for body in ({}, b"{", {"inputs": []}):
        status, headers, answer = post(server, path, body)
        assert (status, headers["cotenant-outcome"], said in answer["error"]) == (404, "unknown", True), answer
    empty = classes()["ModelInferRequest"](model_name=name, model_version=version)
    with pytest.raises(grpc.RpcError) as caught:
        infer_grpc(server, empty)
    assert (caught.value.code(), said in caught.value.details()) == (grpc.StatusCode.NOT_FOUND, True)
    with grpc.insecure_channel(server.grpc_address) as channel:
        (answer,) = channel.stream_stream(
            f"{SERVICE}ModelStreamInfer", request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=classes()["ModelStreamInferResponse"].FromString,
        )(iter([empty]))  # fmt: skip
    assert said in answer.error_message


# ---- statistics ----


def statistics(server: Running) -> Any:
    return ask(server.http_url, "/v2/models/a/stats")[2]["model_stats"][0]


def test_statistics_tell_where_time_goes(server: Running) -> None:
    before = statistics(server)
    for _ in range(3):
        assert infer_json(server, {"data": ROWS.ravel().tolist()}, {})[0] == 200
    # an invalid request, which is not counted for the model
    assert post(server, "models/a/infer", {"inputs": []})[0] == 400
    after = statistics(server)
    assert after["inference_count"] - before["inference_count"] == 6
    assert 3 <= after["execution_count"] - before["execution_count"] <= 6
    assert after["last_inference"] > before["last_inference"]
    times = {
        name: {key: after["inference_stats"][name][key] - old[key] for key in ("count", "ns")}
        for name, old in before["inference_stats"].items()
    }
    assert {name: x["count"] for name, x in times.items()} == {
        "success": 3, "fail": 0, "queue": 3, "compute_input": 3, "compute_infer": 3, "compute_output": 3,
        "cache_hit": 0, "cache_miss": 0,
    }  # fmt: skip
    parts = sum(times[x]["ns"] for x in ("queue", "compute_input", "compute_infer", "compute_output"))
    assert times["success"]["ns"] == pytest.approx(parts, rel=1e-6)
    assert times["compute_infer"]["ns"] > 0
    sizes = {row["batch_size"]: row["compute_infer"]["count"] for row in after["batch_stats"]}
    assert sum(size * count for size, count in sizes.items()) == after["inference_count"]
    assert sum(sizes.values()) == after["execution_count"]
    found = call(server, "ModelStatistics", name="a").model_stats[0]
    assert found.inference_stats.queue.count == after["inference_stats"]["queue"]["count"]
    assert {x.batch_size for x in found.batch_stats} == set(sizes)


# ---- classification ----


def test_classes_by_both_ports(server: Running) -> None:
    wanted = ["0.700000:1:dog", "0.200000:2", "0.500000:0:cat", "0.500000:2"]
    answer = infer_json(server, {"data": ROWS.ravel().tolist()}, {"classification": 2})[2]["outputs"][0]
    assert (answer["datatype"], answer["shape"], answer["data"]) == ("BYTES", [2, 2], wanted)
    message = infer_message(classification=2)
    message.raw_input_contents.append(ROWS.tobytes())
    for _ in range(2):  # at the second time the server knows the head of the request
        found = infer_grpc(server, message)
        assert (found.outputs[0].datatype, list(found.outputs[0].shape)) == ("BYTES", [2, 2])
        assert [x.decode() for x in unpack_strings(found.raw_output_contents[0])] == wanted
    more = infer_json(server, {"data": ROWS.ravel().tolist()}, {"classification": 9})[2]["outputs"][0]
    assert more["shape"] == [2, 3]
    status, _, body = infer_json(server, {"data": ROWS.ravel().tolist()}, {"classification": "2"})
    assert (status, "classification must be a number" in body["error"]) == (400, True)


# ---- shared memory ----


@pytest.fixture
def memory() -> Iterator[Path]:
    """An object of 64 bytes: the input at 8, room for the output from 32 on."""
    path = Path("/dev/shm") / f"cotenant-test-{uuid.uuid4().hex}"
    path.write_bytes(bytes(8) + ROWS.tobytes() + bytes(32))
    yield path
    path.unlink(missing_ok=True)


def placed(region: str, offset: int, size: int = 24) -> dict[str, Any]:
    return {
        "shared_memory_region": region, "shared_memory_offset": offset, "shared_memory_byte_size": size
    }  # fmt: skip


def test_tensors_in_shared_memory_by_http(server: Running, memory: Path) -> None:
    key = f"/{memory.name}"
    path = "systemsharedmemory/region/r"
    assert post(server, f"{path}/register", {"key": key, "offset": 0, "byte_size": 64})[0] == 200
    known = {"name": "r", "key": key, "offset": 0, "byte_size": 64}
    assert ask(server.http_url, "/v2/systemsharedmemory/status")[2] == [known]
    assert ask(server.http_url, f"/v2/{path}/status")[2] == [known]
    assert "already registered" in post(server, f"{path}/register", {"key": key, "byte_size": 64})[2]["error"]
    status, _, answer = infer_json(server, {"parameters": placed("r", 8)}, placed("r", 40))
    assert status == 200
    assert answer["outputs"][0]["parameters"] == placed("r", 40)
    assert "data" not in answer["outputs"][0]
    assert memory.read_bytes()[40:] == ROWS.tobytes()
    for entry, output, said in (
        (placed("r", 48), {}, "is not within shared memory region 'r' of 64 bytes"),
        (placed("r", -8), {}, "is not within"),
        (placed("s", 8), {}, "shared memory region 's' is not registered"),
        (placed("r", 8, 20), {}, "has 20 bytes; its shape and type say 24"),
        (placed("r", 8), placed("r", 40, 20), "output 'y' has 24 bytes, but its shared memory only 20"),
    ):
        status, _, answer = infer_json(server, {"parameters": entry}, output)
        assert (status, said in answer["error"]) == (400, True), answer
    memory.open("r+b").truncate(20)  # the server would be killed if it read this part of a mapping
    status, _, answer = infer_json(server, {"parameters": placed("r", 8)}, {})
    assert (status, "has become smaller" in answer["error"]) == (400, True)
    assert post(server, f"{path}/unregister", {})[0] == 200
    assert ask(server.http_url, "/v2/systemsharedmemory/status")[2] == []
    assert ask(server.http_url, f"/v2/{path}/status")[0] == 404


def test_tensors_in_shared_memory_by_grpc(server: Running, memory: Path) -> None:
    call(server, "SystemSharedMemoryRegister", name="g", key=memory.name, offset=8, byte_size=56)
    found = call(server, "SystemSharedMemoryStatus").regions
    assert (found["g"].key, found["g"].offset, found["g"].byte_size) == (memory.name, 8, 56)
    message = infer_message(**placed("g", 32))
    for key, value in placed("g", 0).items():
        field = "string_param" if isinstance(value, str) else "int64_param"
        setattr(message.inputs[0].parameters[key], field, value)
    answer = infer_grpc(server, message)
    assert memory.read_bytes()[40:] == ROWS.tobytes()
    assert list(answer.raw_output_contents) == [b""]
    assert answer.outputs[0].parameters["shared_memory_byte_size"].int64_param == 24
    call(server, "SystemSharedMemoryUnregister")
    assert not call(server, "SystemSharedMemoryStatus").regions
    with pytest.raises(grpc.RpcError) as caught:
        infer_grpc(server, message)
    assert "is not registered" in caught.value.details()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"key": "/../etc/passwd", "byte_size": 1}, "key must be the name of a shared memory object"),
        ({"key": "/", "byte_size": 1}, "key must be the name"),
        ({"key": "/none-of-this-name", "byte_size": 1}, "no such file"),
        ({"key": "/x", "byte_size": 0}, "byte_size above 0"),
        ({"key": "/x", "byte_size": "1"}, "byte_size above 0"),
        ({"keys": "/x"}, "the body must be"),
    ],
)
def test_regions_that_are_none(server: Running, body: Any, said: str) -> None:
    status, _, answer = post(server, "systemsharedmemory/region/r/register", body)
    assert (status, said in answer["error"]) == (400, True), answer


def test_pages_of_other_sites_neither_load_nor_register(server: Running, memory: Path) -> None:
    body = {"key": f"/{memory.name}", "byte_size": 8}
    for path in ("systemsharedmemory/region/r/register", "repository/models/a/load"):
        status, _, answer = post(server, path, body, headers={"Origin": "https://elsewhere.example"})
        assert (status, answer["error"]) == (400, "requests from pages of other sites are not allowed")


def test_cuda_shared_memory_is_refused_with_a_reason(server: Running) -> None:
    assert ask(server.http_url, "/v2/cudasharedmemory/status")[2] == []
    assert post(server, "cudasharedmemory/unregister", {})[0] == 200
    status, _, answer = post(server, "cudasharedmemory/region/r/register", {})
    assert (status, "use system shared memory" in answer["error"]) == (400, True)
    with pytest.raises(grpc.RpcError) as caught:
        call(server, "CudaSharedMemoryRegister", name="r")
    assert "use system shared memory" in caught.value.details()


# ---- what exists is advertised ----


def test_extensions_are_those_that_exist(server: Running) -> None:
    assert ask(server.http_url, "/v2")[2]["extensions"] == [
        "binary_tensor_data", "classification", "model_configuration", "model_repository",
        "model_repository(unload_dependents)", "parameters", "statistics", "system_shared_memory",
    ]  # fmt: skip


# ---- health and reflection ----


def test_health_by_name(server: Running) -> None:
    def check(name: str) -> bytes:
        with grpc.insecure_channel(server.grpc_address) as channel:
            field = b"" if not name else b"\x0a" + bytes([len(name)]) + name.encode()
            answer: bytes = channel.unary_unary("/grpc.health.v1.Health/Check")(field)
            return answer

    assert check("") == check("inference.GRPCInferenceService") == b"\x08\x01"
    with pytest.raises(grpc.RpcError) as caught:
        check("nobody")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_describes_every_service(server: Running, version: str) -> None:
    from google.protobuf import descriptor_pb2, descriptor_pool

    def field(number: int, data: bytes) -> bytes:
        return struct.pack("BB", number << 3 | 2, len(data)) + data

    with grpc.insecure_channel(server.grpc_address) as channel:
        stream = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
        symbol = b"inference.GRPCInferenceService"
        asked = [field(7, b""), field(4, symbol), field(4, symbol + b".ModelInfer"), field(4, b"nothing.at.all")]
        listed, described, by_method, unknown = stream(iter(asked))
    assert symbol in listed
    assert b"grpc.health.v1.Health" in listed
    assert b"grpc.reflection.v1.ServerReflection" in listed
    assert b"there is no such symbol" in unknown
    kinds = classes_of(version)
    files = kinds.FromString(described).file_descriptor_response.file_descriptor_proto
    assert list(files) == list(kinds.FromString(by_method).file_descriptor_response.file_descriptor_proto)
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(file))
    service = pool.FindServiceByName(symbol.decode())
    assert service.methods_by_name["ModelInfer"].input_type.full_name == "inference.ModelInferRequest"
    assert service.methods_by_name["ModelStreamInfer"].output_type.full_name == "inference.ModelStreamInferResponse"
    assert len(service.methods) == 18


def classes_of(version: str) -> Any:
    from cotenant.core.protobuf import classes as made
    from cotenant.serving.gateway.reflection import _REFLECTION

    return made(f"grpc.reflection.{version}", _REFLECTION)["ServerReflectionResponse"]
