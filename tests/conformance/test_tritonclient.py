"""tritonclient against a running server, over HTTP and gRPC: what its users call works as it is."""

from __future__ import annotations

import queue
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from serve_setup import deployment, plan
from server_thread import Running, running

from cotenant.serving.backends.timed import offset
from cotenant.serving.protocol.messages import classes

tritonclient = pytest.importorskip("tritonclient.utils")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    graph = {
        "name": "pair", "graph": {"a": ["b"]}, "rate_rps": 5, "slo_ms": 60_000, "inputs": {"b": {"INPUT": "a.OUTPUT"}}
    }  # fmt: skip
    services = deployment(
        [{"name": "a", "slo_ms": 60_000}, {"name": "b", "slo_ms": 60_000}], tmp_path_factory.mktemp("triton"),
        applications=[graph],
    )  # fmt: skip
    lets = ({"a": 8, "b": 8}, {"pair:a": 4, "pair:b": 4})
    with running(services, plan=plan(*lets), grpc="127.0.0.1:0") as found:
        yield found


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: Running) -> Iterator[tuple[Any, Any]]:
    """(module of the client, a client)."""
    if request.param == "http":
        import tritonclient.http as module

        made = module.InferenceServerClient(server.http_url.removeprefix("http://"))
    else:
        import tritonclient.grpc as module

        made = module.InferenceServerClient(server.grpc_address)
    yield module, made
    made.close()


def inputs(module: Any, x: np.ndarray, name: str = "INPUT") -> list[Any]:
    given = module.InferInput(name, list(x.shape), tritonclient.np_to_triton_dtype(x.dtype))
    given.set_data_from_numpy(x)
    return [given]


def test_health_and_metadata(client: Any) -> None:
    module, c = client
    assert c.is_server_live()
    assert c.is_server_ready()
    assert c.is_model_ready("a")
    assert c.is_model_ready("a", "1")
    assert not c.is_model_ready("a", "7")
    assert not c.is_model_ready("nobody")
    form = {} if module.__name__.endswith("http") else {"as_json": True}
    assert c.get_server_metadata(**form)["name"] == "cotenant"
    metadata = c.get_model_metadata("a", **form)
    assert metadata["inputs"][0]["name"] == "INPUT"
    assert [int(x) for x in metadata["inputs"][0]["shape"]] == [-1, -1]
    config = c.get_model_config("a", **form)
    config = config.get("config", config)
    assert config["max_batch_size"] == 8
    assert config["input"][0]["data_type"] == "TYPE_FP32"


def test_infer(client: Any) -> None:
    module, c = client
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    answer = c.infer("a", inputs(module, x), request_id="7", outputs=[module.InferRequestedOutput("OUTPUT")])
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT"), x + np.float32(offset("a")))
    got = answer.get_response()
    assert (got["id"] if isinstance(got, dict) else got.id) == "7"


def test_large_tensors_pass_through_windows(client: Any) -> None:
    module, c = client
    # 24 MB, six times the flow-control window of a stream
    x = np.random.default_rng(0).standard_normal((2, 3_000_000), np.float32)
    np.testing.assert_array_equal(c.infer("b", inputs(module, x)).as_numpy("OUTPUT"), x + np.float32(offset("b")))


def test_errors_have_the_right_status(client: Any) -> None:
    module, c = client
    x = np.zeros((1, 2), np.float32)
    http = module.__name__.endswith("http")
    for call, code in (
        (lambda: c.infer("nobody", inputs(module, x)), "404" if http else "NOT_FOUND"),
        (lambda: c.infer("a", inputs(module, x.astype(np.float64))), "400" if http else "INVALID_ARGUMENT"),
        (lambda: c.infer("a", inputs(module, x[0])), "400" if http else "INVALID_ARGUMENT"),
        (lambda: c.infer("a", inputs(module, x), timeout=1), "503" if http else "UNAVAILABLE"),
    ):
        with pytest.raises(tritonclient.InferenceServerException) as caught:
            call()
        assert code in str(caught.value.status())


def test_an_application_is_asked_like_a_model(client: Any) -> None:
    module, c = client
    x = np.ones((2, 3), np.float32)
    answer = c.infer("pair", inputs(module, x)).as_numpy("b.OUTPUT")
    np.testing.assert_array_equal(answer, x + np.float32(offset("a")) + np.float32(offset("b")))


def test_the_live_page_counts_an_application_s_requests_once(client: Any, server: Running) -> None:
    """Its rate is that of the stage that each of its requests begins with; stages say whose they are."""
    from serve_setup import ask

    rows = {row["key"]: row for row in ask(server.http_url, "/state.json")[2]["services"]}
    assert {name: row["part_of"] for name, row in rows.items()} == {
        "a": None, "b": None, "pair": None, "pair:a": "pair", "pair:b": "pair",
    }  # fmt: skip
    server.call(lambda: server.server.replanner.measured.update({"a": 1.0, "pair:a": 7.5, "pair:b": 7.0}))
    rates = {row["key"]: row["rate_rps"] for row in ask(server.http_url, "/state.json")[2]["services"]}
    # not equal to a, because the server measures again between the two rows
    assert rates["pair"] == rates["pair:a"] > rates["pair:b"] > rates["a"]


def test_repository(client: Any, server: Running) -> None:
    module, c = client
    form = {} if module.__name__.endswith("http") else {"as_json": True}

    def states() -> dict[str, str]:
        found = c.get_model_repository_index(**form)
        return {m["name"]: m["state"] for m in (found["models"] if isinstance(found, dict) else found)}

    assert states() == dict.fromkeys(("a", "b", "pair:a", "pair:b", "pair"), "READY")
    http = module.__name__.endswith("http")
    for act in (c.load_model, c.unload_model):
        for name, code in (("nobody", "404" if http else "NOT_FOUND"), ("pair", "400" if http else "INVALID_ARGUMENT")):
            with pytest.raises(tritonclient.InferenceServerException) as caught:
                act(name)
            assert code in str(caught.value.status())
    c.unload_model("pair:a")
    assert (states()["pair:a"], states()["pair"]) == ("UNAVAILABLE", "UNAVAILABLE")
    c.load_model("pair:a")
    assert states()["pair"] == "READY"
    c.unload_model("b")
    assert not c.is_model_ready("b")
    assert states()["b"] == "UNAVAILABLE"
    with pytest.raises(tritonclient.InferenceServerException):
        c.infer("b", inputs(module, np.zeros((1, 1), np.float32)))
    assert c.infer("a", inputs(module, np.zeros((1, 1), np.float32))).as_numpy("OUTPUT")[0, 0] == offset("a")
    c.load_model("b")
    assert c.is_model_ready("b")
    assert c.infer("b", inputs(module, np.zeros((1, 1), np.float32))).as_numpy("OUTPUT")[0, 0] == offset("b")
    c.load_model("b", config='{"max_batch_size": 4}')
    config = c.get_model_config("b", **form)
    assert config.get("config", config)["max_batch_size"] == 4
    with pytest.raises(tritonclient.InferenceServerException, match="files are not accepted over the network"):
        c.load_model("b", config="{}", files={"file:1/model.onnx": b"x"})
    c.load_model("b")
    statistics = c.get_inference_statistics("b", **form)["model_stats"][0]
    assert int(statistics["inference_count"]) >= 1


def test_a_stream_answers_in_order(server: Running) -> None:
    import tritonclient.grpc as module

    c = module.InferenceServerClient(server.grpc_address)
    heard: queue.Queue[tuple[Any, Any]] = queue.Queue()
    c.start_stream(lambda result, error: heard.put((result, error)))
    wanted = []
    for i in range(30):
        model = ("a", "b")[i % 2]
        c.async_stream_infer(model, inputs(module, np.full((1, 1), i, np.float32)), request_id=str(i))
        wanted.append((str(i), i + offset(model)))
    found = []
    for _ in range(30):
        result, error = heard.get(timeout=60)
        assert error is None
        found.append((result.get_response().id, float(result.as_numpy("OUTPUT")[0, 0])))
    assert found == wanted
    # An error in one message is reported in its answer, and the stream stays open.
    c.async_stream_infer("nobody", inputs(module, np.zeros((1, 1), np.float32)))
    assert "nobody" in str(heard.get(timeout=60)[1])
    c.async_stream_infer("a", inputs(module, np.zeros((1, 1), np.float32)))
    assert heard.get(timeout=60)[1] is None
    c.stop_stream()
    c.close()


def test_typed_contents_and_compressed_messages(server: Running) -> None:
    """What other clients send: numbers as typed fields, gzip."""
    import grpc

    kinds = classes()
    message = kinds["ModelInferRequest"](model_name="a")
    entry = message.inputs.add(name="INPUT", datatype="FP32", shape=[1, 2])
    entry.contents.fp32_contents.extend([1.5, 2.5])
    with grpc.insecure_channel(server.grpc_address, compression=grpc.Compression.Gzip) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=kinds["ModelInferResponse"].FromString,
        )
        answer = call(message)
        got = np.frombuffer(answer.raw_output_contents[0], np.float32).tolist()
        assert got == [1.5 + offset("a"), 2.5 + offset("a")]
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"\x08\x01"
        nothing = channel.unary_unary("/inference.GRPCInferenceService/Nothing")
        with pytest.raises(grpc.RpcError) as caught:
            nothing(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_messages_agree_with_the_client_s() -> None:
    """Every field that is declared here has the number and type that tritonclient's messages have."""
    from tritonclient.grpc import service_pb2

    seen: set[str] = set()
    checked = 0

    def walk(own: Any, other: Any) -> int:
        if own.full_name in seen:
            return 0
        seen.add(own.full_name)
        count = 0
        for field in own.fields:
            twin = other.fields_by_name[field.name]
            own_kind, kind = ((x.number, x.type, x.is_repeated) for x in (field, twin))
            assert own_kind == kind, field.full_name
            count += 1
            if field.enum_type is not None:
                values, others = ({v.name: v.number for v in x.enum_type.values} for x in (field, twin))
                assert values == others
            if field.message_type is not None:
                count += walk(field.message_type, twin.message_type)
        return count

    for name, kind in classes().items():
        if hasattr(service_pb2, name):
            checked += walk(kind.DESCRIPTOR, getattr(service_pb2, name).DESCRIPTOR)
    assert checked > 100
    assert {kind.DESCRIPTOR.full_name for kind in classes().values()} <= seen


def test_shared_memory_statistics_and_classes(client: Any) -> None:
    """What Triton's examples do, with its client's own helper for shared memory."""
    import tritonclient.utils.shared_memory as shm

    module, c = client
    form = {} if module.__name__.endswith("http") else {"as_json": True}
    x = np.array([[1.0, 3.0, 2.0]], np.float32)
    c.unregister_system_shared_memory()
    c.unregister_cuda_shared_memory()
    name = f"/cotenant-triton-{uuid.uuid4().hex}"
    handle = shm.create_shared_memory_region("data", name, 24)
    try:
        shm.set_shared_memory_region(handle, [x])
        c.register_system_shared_memory("data", name, 24)
        assert "data" in str(c.get_system_shared_memory_status(**form))
        given = module.InferInput("INPUT", [1, 3], "FP32")
        given.set_shared_memory("data", 12)
        wanted = module.InferRequestedOutput("OUTPUT")
        wanted.set_shared_memory("data", 12, 12)
        c.infer("a", [given], outputs=[wanted])
        found = shm.get_contents_as_numpy(handle, np.float32, [1, 3], 12)
        np.testing.assert_array_equal(found, x + np.float32(offset("a")))
        c.unregister_system_shared_memory("data")
    finally:
        shm.destroy_shared_memory_region(handle)
    classes_of = module.InferRequestedOutput("OUTPUT", class_count=1)
    answer = c.infer("a", inputs(module, x), outputs=[classes_of]).as_numpy("OUTPUT")
    assert answer.shape == (1, 1)
    assert answer[0, 0].decode() == f"{np.float32(3.0) + np.float32(offset('a')):f}:1"
    found = c.get_inference_statistics("a", **form)["model_stats"][0]["inference_stats"]
    assert all(int(found[name]["ns"]) > 0 for name in ("success", "compute_infer"))
