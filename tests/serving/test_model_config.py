"""Fields of config.pbtxt that say which files are served, and in which shapes: applied, or refused with a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from identity_models import identity
from serve_setup import ask, deployment, plan
from server_thread import Running, running

from cotenant.core.errors import InputError
from cotenant.serving.config.server import ModelEntry
from cotenant.serving.protocol.tensors import ModelInfo, TensorSpec
from cotenant.serving.workers.configured import shaped
from cotenant.serving.workers.repository import Found, find

pytest.importorskip("onnx")

X, Y = TensorSpec("x", "FP32", (-1,)), TensorSpec("y", "FP32", (-1,))
INFO = ModelInfo((X,), (Y,), True, "onnxruntime_onnx")


def found(folder: Path, config: str, backend: Any = "auto", version: int | None = None) -> Found:
    (folder / "config.pbtxt").write_bytes(config.encode())
    return find(ModelEntry("svc", "m", backend, folder, version))


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A model with the versions 1, 2 and 10, each with files of two backends."""
    for number in (1, 2, 10):
        (tmp_path / str(number)).mkdir()
        for name in ("model.onnx", "model.pt", "net.onnx"):
            (tmp_path / str(number) / name).touch()
    return tmp_path


def test_a_version_policy_chooses_the_version(three: Path) -> None:
    assert found(three, "version_policy { specific { versions: [1, 2, 7] } }").version == "2"
    assert found(three, "version_policy { specific { versions: 1 } }", version=10).version == "10", "services.yaml wins"
    for policy in ("latest { num_versions: 2 }", "all { }"):
        assert found(three, f"version_policy {{ {policy} }}").version == "10"
    with pytest.raises(InputError, match=r"config\.pbtxt: version_policy names the versions 3, 9; there are 1, 2, 10"):
        found(three, "version_policy { specific { versions: [3, 9] } }")


@pytest.mark.parametrize(
    ("config", "backend"),
    [
        ('backend: "onnxruntime"', "onnx"), ('platform: "onnxruntime_onnx"', "onnx"), ('backend: "pytorch"', "torch"),
        ('platform: "pytorch_libtorch"', "torch"), ("", "onnx"), ('\ufeffbackend: "pytorch"\r\n', "torch"),
    ],
)  # fmt: skip
def test_a_backend_chooses_the_file(three: Path, config: str, backend: str) -> None:
    assert found(three, config).backend == backend


def test_what_cannot_run_here_is_refused(three: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.pbtxt: backend 'tensorrt' is not one that runs here \(onnxruntime"):
        found(three, 'backend: "tensorrt"')
    with pytest.raises(InputError, match="platform 'tensorflow_savedmodel' is not one that runs here"):
        found(three, 'platform: "tensorflow_savedmodel"')
    with pytest.raises(InputError, match=r"is for backend torch; services\.yaml has backend: onnx"):
        found(three, 'backend: "pytorch"', backend="onnx")
    assert found(three, 'backend: "tensorrt"', backend="timed").backend == "timed"  # stands in for any model
    with pytest.raises(InputError, match=r"10: has none of model\.py"):
        found(three, 'backend: "python"')
    with pytest.raises(InputError, match="max_batch_size is -1, but must be at least 0"):
        found(three, "max_batch_size: -1")
    with pytest.raises(InputError, match="field config: backend 'openvino' is not one"):
        find(ModelEntry("svc", "m", "auto", three, None), {"backend": "openvino"})


def test_a_file_name_chooses_the_file(three: Path) -> None:
    assert found(three, 'default_model_filename: "net.onnx"').backend == "onnx"
    assert found(three, 'default_model_filename: "model.pt"').backend == "torch"
    for name in ("other.onnx", "../1/model.onnx", "model.plan", "notes"):
        with pytest.raises(InputError, match=f"10: has no file {name}"):
            found(three, f'default_model_filename: "{name}"')


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"name": "x", "dims": [2, 3]}, ""),  # lists the batch, too
        ({"name": "x", "dims": [2, 3, 4]}, "has the dims [-1], not [2, 3, 4] as the configuration says"),
        ({"name": "x", "dims": [1], "reshape": {}}, "has the dims [-1], not [] as its reshape says"),
        ({"name": "x", "dims": [2, 3], "reshape": {"shape": [5]}}, "a reshape from [2, 3] to [5], which has another"),
        ({"name": "x", "dims": [-1, -1], "reshape": {"shape": [-1]}}, "a reshape with more than one free size"),
    ],
)
def test_shapes_that_are_not_the_models(entry: dict[str, Any], said: str) -> None:
    if not said:
        assert shaped({"input": [entry]}, INFO)[0] == INFO
        return
    with pytest.raises(ValueError) as refused:
        shaped({"input": [entry]}, INFO)
    assert said in str(refused.value)


def test_a_name_counts_once() -> None:
    with pytest.raises(ValueError, match="the configuration has the input 'x' twice"):
        shaped({"input": [{"name": "x"}, {"name": "x"}]}, INFO)


def test_scalars_and_items_of_models_without_a_batch() -> None:
    flat = ModelInfo((TensorSpec("x", "FP32", ()),), (Y,), True, "")
    info, shapes = shaped({"input": [{"name": "x", "dims": [1], "reshape": {}}]}, flat)
    assert info.inputs == (TensorSpec("x", "FP32", (1,)),)
    assert [x.shape for x in shapes.inputs([np.zeros((3, 1))], 3)] == [(3,)]
    assert [x.shape for x in shapes.outputs([np.zeros((3, 2))], 3)] == [(3, 2)]
    single = ModelInfo((TensorSpec("x", "FP32", (2, 3)),), (Y,), False, "")
    info, shapes = shaped({"input": [{"name": "x", "dims": [6], "reshape": {"shape": [2, 3]}}]}, single)
    assert info.inputs[0].shape == (6,)
    assert [x.shape for x in shapes.inputs([np.zeros((4, 6))], 4)] == [(4, 2, 3)]


CONFIG = """
max_batch_size: 2
input { name: "x" data_type: TYPE_FP32 dims: [1, 3] reshape { shape: 3 } }
output { name: "y" data_type: TYPE_FP32 dims: [3, 1] reshape { shape: [-1] } }
parameters { key: "owner" value { string_value: "ada" } }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("config")
    identity(folder / "m", "FP32")
    (folder / "m" / "config.pbtxt").write_text(CONFIG)
    services = [{"name": "a", "model": str(folder / "m"), "backend": "onnx", "slo_ms": 20_000}]
    with running(deployment(services, folder) | {"mechanism": "cores"}, plan=plan({"a": 8})) as made:
        yield made


def test_a_client_sees_the_configured_shapes(server: Running) -> None:
    config = ask(server.http_url, "/v2/models/a/config")[2]
    assert [config[side][0]["dims"] for side in ("input", "output")] == [[1, 3], [3, 1]]
    assert config["parameters"] == {"owner": {"string_value": "ada"}}
    values = [float(x) for x in range(15)]
    body = {"inputs": [{"name": "x", "shape": [5, 1, 3], "datatype": "FP32", "data": values}]}
    status, _, answer = ask(server.http_url, "/v2/models/a/infer", body)
    assert (status, answer["outputs"][0]["shape"], answer["outputs"][0]["data"]) == (200, [5, 3, 1], values)
    body = {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": values[:3]}]}
    status, _, answer = ask(server.http_url, "/v2/models/a/infer", body)
    assert (status, answer["error"]) == (400, "input 'x' has shape [1, 3]; the model takes [-1, 1, 3]")


def test_a_free_size_that_the_configuration_fixes(server: Running) -> None:
    config = '{"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [3]}]}'
    path = "/v2/repository/models/a/load"
    assert ask(server.http_url, path, {"parameters": {"config": config}}, "POST")[0] == 200
    for size, expected in ((3, 200), (4, 400)):
        body = {"inputs": [{"name": "x", "shape": [1, size], "datatype": "FP32", "data": [1.0] * size}]}
        assert ask(server.http_url, "/v2/models/a/infer", body)[0] == expected
    assert ask(server.http_url, path, {}, "POST")[0] == 200
