"""Model repositories and backends: what is found, what is said of what is not, and real models answering."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from heard import heard
from serve_setup import ask, deployment, plan
from server_thread import running

from cotenant.bench.onnx_model import perceptron
from cotenant.core.errors import InputError
from cotenant.serving.config.server import ModelEntry
from cotenant.serving.protocol.tensors import Tensor, TensorSpec, from_array, to_array
from cotenant.serving.worker import Job, LoadError, ModelSpec, WorkerSpec
from cotenant.serving.workers.engine import Engine
from cotenant.serving.workers.repository import find, read_config

onnx = pytest.importorskip("onnx")


def entry(path: Path | None, backend: Any = "auto", version: int | None = None) -> ModelEntry:
    return ModelEntry("svc", "m", backend, path, version)


def engine(backend: str, path: Path, batch: int = 8, **config: Any) -> Engine:
    model = ModelSpec("svc", "m", backend, str(path), "1", batch, config)
    return Engine(WorkerSpec("w", 0, "cpu", "100%", 1.0, "cores", (model,)), (0,))


def save(graph: Any, folder: Path, opset: int = 13) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    made = onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", opset)])
    onnx.checker.check_model(made)
    onnx.save(made, folder / "model.onnx")
    return folder


def value(name: str, shape: list[Any], kind: int | None = None) -> Any:
    return onnx.helper.make_tensor_value_info(name, kind or onnx.TensorProto.FLOAT, shape)


# ---- what is found ----


def test_the_largest_version_is_served_unless_another_is_named(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "model.onnx").write_bytes(perceptron(4))
    (tmp_path / "notes").mkdir()
    found = find(entry(tmp_path))
    assert (found.backend, found.version, found.path) == ("onnx", "10", str(tmp_path / "10"))
    assert find(entry(tmp_path, version=2)).version == "2"
    with pytest.raises(InputError, match="no version 3; there are 1, 2, 10"):
        find(entry(tmp_path, version=3))


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no model at .*nothing"):
        find(entry(tmp_path / "nothing"))
    with pytest.raises(InputError, match="no model named"):
        find(entry(None))
    (tmp_path / "1").mkdir()
    with pytest.raises(InputError, match=r"has none of model\.onnx"):
        find(entry(tmp_path))
    with pytest.raises(InputError, match=r"has no model\.onnx"):
        find(entry(tmp_path, "onnx"))
    assert find(entry(None, "timed")).backend == "timed"


CONFIG = Path("config.pbtxt")


def test_configurations_in_protobuf_text() -> None:
    text = r"""
    # a comment
    name: "m" "n"  platform: 'onnxruntime_onnx'
    max_batch_size: 0
    input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, -1 ] }, { name: "k", data_type: TYPE_INT64, dims: 1 } ]
    output { name: "y" data_type: 11 dims: 3 dims: 4; reshape < shape: 12 > }
    instance_group < kind: KIND_CPU gpus: [] >
    dynamic_batching { priority_queue_policy { key: 7 value: { timeout_action: DELAY } } }
    parameters: { key: "a\"b\x41\n" value: { string_value: "1" } }
    parameters [ { key: "c" value: { string_value: "\303\244" } } ]
    version_policy: { latest { num_versions: 1 } }
    """
    assert read_config(text, CONFIG) == {
        "name": "mn",
        "platform": "onnxruntime_onnx",
        "max_batch_size": 0,
        "input": [
            {"name": "x", "data_type": "TYPE_FP32", "dims": [3, -1]},
            {"name": "k", "data_type": "TYPE_INT64", "dims": [1]},
        ],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [3, 4], "reshape": {"shape": [12]}}],
        "instance_group": [{"kind": "KIND_CPU"}],
        "dynamic_batching": {"priority_queue_policy": {7: {"timeout_action": "DELAY"}}},
        "parameters": {'a"bA\n': {"string_value": "1"}, "c": {"string_value": "ä"}},
        "version_policy": {"latest": {"num_versions": 1}},
    }
    assert read_config("  \n", CONFIG) == {}
    assert "max_batch_size" not in read_config('name: "m"', CONFIG)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("input {", 1, "expected"),
        ("name: ", 1, "string"),
        ("name }", 1, ""),
        ("max_batch_size: 1\n1: 2", 2, ""),
        ("name: @", 1, ""),
        ('"x"', 1, ""),
        ("max_batch_size: 8.5", 1, "8.5"),
        ("\n\nmax_batchsize: 8", 3, 'no field named "max_batchsize"'),
        ("input {\n nam: 'x' }", 2, 'no field named "nam"'),
        ("input { data_type: TYPE_FP8 }", 1, "TYPE_FP8"),
        ("ensemble_scheduling { }", 1, 'no field named "ensemble_scheduling": write an ensemble as an application'),
        ("sequence_batching { }", 1, "models that keep state between requests are not supported"),
    ],
)
def test_what_is_no_configuration_is_refused_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"config.pbtxt, line {line}: ")) as refused:
        read_config(text, CONFIG)
    assert words in refused.value.message


# ---- models that run ----


def test_the_benchmark_s_model_is_what_it_says(tmp_path: Path) -> None:
    """The bytes written by hand are a valid model that computes y = relu(x w0) w1."""
    made = onnx.load_from_string(perceptron(6, 2, seed=3))
    onnx.checker.check_model(made)
    w0, w1 = (onnx.numpy_helper.to_array(w) for w in made.graph.initializer)
    (tmp_path / "model.onnx").write_bytes(perceptron(6, 2, seed=3))
    own = engine("onnx", tmp_path)
    info = own.load()["svc"]
    assert info.batchable
    assert info.inputs == (TensorSpec("x", "FP32", (6,)),)
    x = np.random.default_rng(0).standard_normal((3, 6), np.float32)
    result = own.run(Job(1, "svc", [[from_array("x", row)] for row in x]))
    got = np.stack([to_array(answer[0]) for answer in result.answers])  # type: ignore[arg-type]
    np.testing.assert_allclose(got, np.maximum(x @ w0, 0) @ w1, rtol=1e-5)


def test_items_of_other_shapes_share_a_batch(tmp_path: Path) -> None:
    """Free sizes: groups of equal shape run together, each item gets its own answer."""
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Div", ["x", "d"], ["y"])], "g",
        [value("x", ["n", "w"], onnx.TensorProto.INT64), value("d", ["n", 1], onnx.TensorProto.INT64)],
        [value("y", ["n", "w"], onnx.TensorProto.INT64)],
    )  # fmt: skip
    own = engine("onnx", save(graph, tmp_path))
    own.load()

    def item(x: list[int], d: int) -> list[Tensor]:
        return [from_array("x", np.array(x, np.int64)), from_array("d", np.array([d], np.int64))]

    units = [item([10, 20], 5), item([9], 3), item([6, 8], 2), item([7, 7, 7], 7)]
    answers = own.run(Job(1, "svc", units)).answers
    assert [to_array(a[0]).tolist() for a in answers] == [[2, 4], [3], [3, 4], [1, 1, 1]]  # type: ignore[arg-type]


def test_a_model_without_a_batch_runs_items_one_by_one(tmp_path: Path) -> None:
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)], "g", [value("x", [2, 3])], [value("y", [])]
    )
    folder = save(graph, tmp_path / "models" / "sum" / "1").parent
    services = deployment([{"name": "a", "model": str(folder), "backend": "onnx", "slo_ms": 60_000}], tmp_path)
    with running(services | {"mechanism": "cores"}, plan=plan({"a": 4})) as server:
        body = {"inputs": [{"name": "x", "shape": [2, 3], "datatype": "FP32", "data": [1, 2, 3, 4, 5, 6]}]}
        status, _, answer = ask(server.http_url, "/v2/models/a/infer", body)
        assert status == 200, answer
        assert answer["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [], "data": [21.0]}]
        assert ask(server.http_url, "/v2/models/a")[2]["inputs"][0]["shape"] == [2, 3]


def test_strings_go_through_a_model(tmp_path: Path) -> None:
    kind = onnx.TensorProto.STRING
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["s"], ["t"])], "g", [value("s", ["n", 2], kind)],
        [value("t", ["n", 2], kind)],
    )  # fmt: skip
    folder = save(graph, tmp_path / "models" / "echo" / "1").parent
    services = deployment([{"name": "a", "model": str(folder), "backend": "onnx", "slo_ms": 60_000}], tmp_path)
    with running(services | {"mechanism": "cores"}, plan=plan({"a": 4})) as server:
        body = {"inputs": [{"name": "s", "shape": [2, 2], "datatype": "BYTES", "data": ["ä", "", "b" * 300, "c"]}]}
        answer = ask(server.http_url, "/v2/models/a/infer", body)[2]
        assert answer["outputs"][0]["data"] == ["ä", "", "b" * 300, "c"]


def test_a_broken_file_names_its_model(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(LoadError) as caught:
        engine("onnx", tmp_path).load()
    assert caught.value.service == "svc"
    assert len(str(caught.value)) < 600


def test_without_a_profile_the_machine_s_cores_are_measured(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(perceptron(8))
    service = {"name": "a", "model": str(tmp_path / "m"), "slo_ms": 500, "rate_rps": 20}
    content = {"gpus": {"count": 1, "model": "cpu"}, "mechanism": "cores", "services": [service], "verify": False}
    with heard() as said, running(content) as server:
        assert said[0].startswith("measuring m on this machine's cores")
        assert server.status()["services"][0]["capacity_rps"] > 20
        body = {"inputs": [{"name": "x", "shape": [1, 8], "datatype": "FP32", "data": [0.0] * 8}]}
        assert ask(server.http_url, "/v2/models/a/infer", body)[2]["outputs"][0]["data"] == [0.0] * 8


def test_a_model_that_cannot_be_measured_is_left_out_and_samples_measure_it(tmp_path: Path) -> None:
    """`picky` fails on everything but a row that begins with 7; `gone` has no file."""
    (tmp_path / "good" / "1").mkdir(parents=True)
    (tmp_path / "good" / "1" / "model.onnx").write_bytes(perceptron(8))
    helper, kind = onnx.helper, onnx.TensorProto
    table = helper.make_tensor("table", kind.FLOAT, [2], [1.0, 2.0])
    nodes = [helper.make_node("Gather", ["table", "x"], ["y"])]  # an index over 1 is an error
    graph = helper.make_graph(nodes, "g", [value("x", ["n", 40], kind.INT64)], [value("y", ["n", 40])], [table])
    save(graph, tmp_path / "picky" / "1")
    services = [
        {"name": name, "model": str(tmp_path / name), "slo_ms": 60_000, "rate_rps": 5}
        for name in ("picky", "good", "gone")
    ]
    content: dict[str, Any] = {
        "gpus": {"count": 1, "model": "cpu"}, "mechanism": "cores", "services": services, "verify": False,
    }  # fmt: skip
    row = {"name": "x", "shape": [1, 40], "datatype": "INT64", "data": [1] * 40}
    with running(content) as server:
        found = {s["name"]: s["not_ready"] for s in server.status()["services"]}
        assert found["good"] == ""
        assert found["picky"].startswith("the model cannot be measured (set the key sample to a file")
        assert "Gather" in found["picky"]
        assert "no model at" in found["gone"]
        assert ask(server.http_url, "/v2/models/picky/infer", {"inputs": [row]})[0] == 503
        status, _, body = ask(server.http_url, "/v2/repository/models/picky/load", {}, "POST", timeout=60)
        assert (status, "cannot be measured" in body["error"]) == (400, True)
    sample = tmp_path / "sample.json"
    sample.write_text('{"inputs": []}')
    services[0]["sample"] = str(sample)
    said = "inputs must be a list of tensors"
    with pytest.raises(InputError, match=said), running(content | {"services": services[:1]}):
        pass
    sample.write_text(json.dumps({"inputs": [row]}))
    with running(content | {"services": services[:2]}) as server:
        assert ask(server.http_url, "/v2/models/picky/infer", {"inputs": [row]})[2]["outputs"][0]["data"] == [2.0] * 40


def test_a_model_that_is_not_there_is_not_measured(tmp_path: Path) -> None:
    service = {"name": "cats", "model": str(tmp_path / "tinny"), "slo_ms": 500, "rate_rps": 20}
    content = {"gpus": {"count": 1, "model": "cpu"}, "mechanism": "cores", "services": [service], "verify": False}
    with heard() as said, pytest.raises(InputError) as caught, running(content):
        pass
    assert not said
    assert caught.value.field == "services.cats.model"
    assert caught.value.message.startswith(f"no model at {tmp_path / 'tinny'}")


def test_a_timed_model_with_times_of_its_own_needs_no_profile(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    service = {"name": "a", "model": str(tmp_path / "m"), "slo_ms": 500, "rate_rps": 20}
    content = {
        "gpus": {"count": 1, "model": "cpu"}, "mechanism": "cores", "backend": "timed", "services": [service],
        "verify": False,
    }  # fmt: skip
    with pytest.raises(InputError, match="latency_ms in its timed"), running(content):
        pass
    (tmp_path / "m" / "1" / "timed.json").write_text('{"latency_ms": {"1": 5, "8": 12}}')
    with running(content) as server:
        assert 20 < server.status()["services"][0]["capacity_rps"] < 8 / 0.012  # a batch of eight items takes 12 ms


@pytest.mark.extras
def test_torch_models_exported_and_scripted(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
    x = np.random.default_rng(0).standard_normal((3, 4), np.float32)
    wanted = net(torch.from_numpy(x)).detach().numpy()
    (tmp_path / "exported").mkdir()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(net, (torch.zeros(2, 4),), dynamic_shapes=({0: batch},))
    torch.export.save(program, str(tmp_path / "exported" / "model.pt2"))
    (tmp_path / "scripted").mkdir()
    torch.jit.trace(net, torch.zeros(1, 4)).save(str(tmp_path / "scripted" / "model.pt"))
    named = {"max_batch_size": 8, "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}],
             "output": [{"name": "logits", "data_type": "TYPE_FP32", "dims": [2]}]}  # fmt: skip
    for folder, config, names in (("exported", {}, ("input", "OUTPUT0")), ("scripted", named, ("x", "logits"))):
        own = engine("torch", tmp_path / folder, **config)
        info = own.load()["svc"]
        assert (info.inputs[0].name, info.outputs[0].name) == names
        assert (info.inputs[0].shape, info.outputs[0].shape, info.batchable) == ((4,), (2,), True)
        result = own.run(Job(1, "svc", [[from_array(names[0], row)] for row in x]))
        got = np.stack([to_array(answer[0]) for answer in result.answers])  # type: ignore[arg-type]
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(LoadError, match=r"config\.pbtxt must have input"):
        engine("torch", tmp_path / "scripted").load()


# ---- Python files ----

SUM = """
INPUTS = [("X", "FP32", [4])]
OUTPUTS = [("SUM", "FP32", [1]), ("COUNT", "INT64", [1])]

def run(x):
    if (x < 0).any():
        raise ValueError("below 0")
    return x.sum(axis=1, keepdims=True), [[len(x)]] * len(x)
"""


def python_file(folder: Path, text: str) -> Path:
    (folder / "1").mkdir()
    (folder / "1" / "model.py").write_text(text)
    return folder


def test_a_python_file_is_a_model(tmp_path: Path) -> None:
    found = find(entry(python_file(tmp_path, SUM)))
    assert (found.backend, found.path) == ("python", str(tmp_path / "1"))
    made = engine("python", tmp_path / "1")
    info = made.load()["svc"]
    assert (info.inputs[0], info.batchable, info.platform) == (TensorSpec("X", "FP32", (4,)), True, "python")
    rows = [np.arange(4, dtype=np.float32), np.full(4, 2, np.float32), np.full(4, -1, np.float32)]
    answers = made.run(Job(1, "svc", [[from_array("X", x, "FP32")] for x in rows])).answers
    assert answers[2] == "below 0", "one item's failure is its own"
    sums = [to_array(answer[0]).tolist() for answer in answers[:2] if not isinstance(answer, str)]
    assert sums == [[6.0], [8.0]]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("run = 3", "model.py has no function run"),
        ("def run(x): return x", "model.py has no INPUTS"),
        ("INPUTS = [('X', 'FP32')]\ndef run(x): return x", "INPUTS of model.py are not rows"),
        ("INPUTS = [('X', 'FP31', [1])]\ndef run(x): return x", "X of model.py is FP31, which is not one of BOOL"),
        ("import no_such_module", "No module named 'no_such_module'"),
    ],
)
def test_a_python_file_that_is_no_model_says_why(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(LoadError, match=re.escape(why)):
        engine("python", python_file(tmp_path, text) / "1").load()


def test_a_python_file_gives_what_it_promised(tmp_path: Path) -> None:
    made = engine("python", python_file(tmp_path, SUM.replace(", [[len(x)]] * len(x)", "")) / "1")
    made.load()
    (answer,) = made.run(Job(1, "svc", [[from_array("X", np.ones(4, np.float32), "FP32")]])).answers
    assert answer == "run returned 1 arrays, but OUTPUTS has 2"


def test_a_worker_whose_device_is_lost_knows_it() -> None:
    class Model:
        info: Any = None
        broken = False

        def lost(self) -> bool:
            return self.broken

    worker = Engine(WorkerSpec("w", 0, "X", "100%", 1.0, "mps", ()))
    model = Model()
    worker._models["a"] = model  # type: ignore[assignment]
    assert not worker.lost()
    model.broken = True
    assert worker.lost()
