"""Loading a model with a configuration of the request's own: applied, or refused in a sentence; never ignored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serve_setup import ask, deployment, plan
from server_thread import Running, running

onnx = pytest.importorskip("onnx")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("load")
    path = folder / "models" / "m" / "1"
    path.mkdir(parents=True)
    sides = [onnx.helper.make_tensor_value_info(x, onnx.TensorProto.FLOAT, ["n", 3]) for x in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "g", sides[:1], sides[1:])
    made = onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 13)])
    onnx.save(made, path / "model.onnx")
    services = [{"name": "a", "model": str(path.parent), "backend": "onnx", "slo_ms": 20_000}]
    with running(deployment(services, folder) | {"mechanism": "cores"}, plan=plan({"a": 8})) as found:
        yield found


def load(server: Running, parameters: Any, verb: str = "load") -> Any:
    return ask(server.http_url, f"/v2/repository/models/a/{verb}", {"parameters": parameters}, "POST", timeout=60)


def loaded_with(server: Running, config: Any) -> Any:
    status, _, body = load(server, {"config": json.dumps(config)})
    return status, body["error"] if status != 200 else ""


def batch_limit(server: Running) -> int:
    found: int = ask(server.http_url, "/v2/models/a/config")[2]["max_batch_size"]
    return found


def test_a_configuration_holds_until_the_next_load(server: Running) -> None:
    assert load(server, {})[0] == 200
    assert batch_limit(server) == 8
    entry = {"name": "x", "data_type": "TYPE_FP32", "dims": ["3"]}
    assert loaded_with(server, {"maxBatchSize": 2, "input": [entry]}) == (200, "")
    assert batch_limit(server) == 2
    rows = [[float(3 * i), 1.0, 2.0] for i in range(5)]
    body = {"inputs": [{"name": "x", "shape": [5, 3], "datatype": "FP32", "data": rows}]}
    answer = ask(server.http_url, "/v2/models/a/infer", body)[2]
    assert answer["outputs"][0]["data"] == [x for row in rows for x in row]
    assert loaded_with(server, {"max_batch_size": 0}) == (200, "")
    assert batch_limit(server) == 0
    assert load(server, {})[0] == 200
    assert batch_limit(server) == 8


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"max_batchsize": 2}, 'no field named "max_batchsize"'),
        ({"max_batch_size": "many"}, "is no model configuration"),
        ([], "is no model configuration"),
        ({"name": "b"}, "is for 'b', not for 'a'"),
        ({"instance_group": [{"count": 2}]}, "has the field instance_group, which has no effect here"),
        ({"input": [{"name": "z"}]}, "the configuration has the input 'z'; the model's are x"),
        ({"output": [{"name": "y", "data_type": "TYPE_INT8"}]}, "output 'y' is TYPE_FP32, not TYPE_INT8"),
        ({"output": [{"name": "y", "label_filename": "../secret"}]}, "is not the name of a file in the model's folder"),
        ({"input": [{"name": "x", "dims": [4]}]}, "input 'x' has the dims [3], not [4]"),
    ],
)
def test_a_configuration_that_cannot_be_applied(server: Running, config: Any, said: str) -> None:
    status, why = loaded_with(server, config)
    assert status == 400
    assert said in why
    assert ask(server.http_url, "/v2/models/a/ready")[0] == 200


@pytest.mark.parametrize(
    ("verb", "parameters", "said"),
    [
        (
            "load",
            {"config": "{}", "file:1/model.onnx": "AAAA"},
            "file:1/model.onnx: files are not accepted over the net",
        ),
        ("load", {"config": {}}, "load takes one parameter, config"),
        ("load", {"version": "1"}, "got 'version'"),
        ("load", [], "the body must be {}"),
        ("unload", {"config": "{}"}, "unload takes one parameter, unload_dependents"),
        ("unload", {"unload_dependents": 1}, "a boolean"),
    ],
)
def test_parameters_that_are_none(server: Running, verb: str, parameters: Any, said: str) -> None:
    status, _, body = load(server, parameters, verb)
    assert status == 400
    assert said in body["error"]
    assert ask(server.http_url, "/v2/models/a/ready")[0] == 200
