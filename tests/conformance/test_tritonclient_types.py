"""Every data type at its extremes by tritonclient: both protocols, every encoding that its client can send."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from identity_models import FIELDS, VALUES, identities
from serve_setup import plan
from server_thread import Running, running

pytest.importorskip("tritonclient.utils")
pytest.importorskip("onnx")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    content = identities(tmp_path_factory.mktemp("types"))
    with running(content, plan=plan(dict.fromkeys([*VALUES, "pair"], 8)), grpc="127.0.0.1:0") as found:
        yield found


def array(datatype: str) -> np.ndarray:
    from tritonclient.utils import triton_to_np_dtype

    values = VALUES[datatype]
    if datatype == "BYTES":
        return np.array([[x.encode() for x in values]], object)
    return np.array([values], triton_to_np_dtype(datatype))


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Equal bit by bit; strings as bytes."""
    if wanted.dtype == object:
        return [x if isinstance(x, bytes) else x.encode() for x in found.ravel()] == wanted.ravel().tolist()
    return found.dtype == wanted.dtype and found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("datatype", VALUES)
def test_over_http_in_both_encodings_each_way(server: Running, datatype: str) -> None:
    import tritonclient.http as module

    client, x = module.InferenceServerClient(server.http_url.removeprefix("http://")), array(datatype)
    for binary_in in (True, False):
        for binary_out in (True, False):
            given = module.InferInput("x", list(x.shape), datatype)
            given.set_data_from_numpy(x, binary_data=binary_in)
            wanted = [module.InferRequestedOutput("y", binary_data=binary_out)]
            assert same(client.infer(datatype, [given], outputs=wanted).as_numpy("y"), x), (binary_in, binary_out)
    client.close()


@pytest.mark.parametrize("datatype", VALUES)
def test_over_grpc_raw_and_typed(server: Running, datatype: str) -> None:
    import grpc
    import tritonclient.grpc as module
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    client, x = module.InferenceServerClient(server.grpc_address), array(datatype)
    given = module.InferInput("x", list(x.shape), datatype)
    given.set_data_from_numpy(x)
    raw: Any = client.infer(datatype, [given])
    assert same(raw.as_numpy("y"), x)
    client.close()
    if datatype not in FIELDS:
        return
    message = service_pb2.ModelInferRequest(model_name=datatype)
    entry = message.inputs.add(name="x", datatype=datatype, shape=x.shape)
    getattr(entry.contents, FIELDS[datatype]).extend(x.ravel().tolist())
    with grpc.insecure_channel(server.grpc_address) as channel:
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message)
    assert answer.raw_output_contents == raw.get_response().raw_output_contents
