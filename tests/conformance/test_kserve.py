"""KServe's Python clients against a running server, by REST and gRPC; skipped where kserve is not installed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from serve_setup import deployment, plan
from server_thread import Running, running

from cotenant.serving.backends.timed import offset

kserve = pytest.importorskip("kserve")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    services = deployment([{"name": "a", "slo_ms": 60_000}], tmp_path_factory.mktemp("kserve"))
    with running(services, plan=plan({"a": 8}), grpc="127.0.0.1:0") as found:
        yield found


def rows(binary: bool) -> Any:
    given = kserve.InferInput(name="INPUT", shape=[2, 2], datatype="FP32")
    given.set_data_from_numpy(np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), binary_data=binary)
    return given


WANTED = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32) + np.float32(offset("a"))


@pytest.mark.parametrize("binary", [False, True])
def test_rest(server: Running, binary: bool) -> None:
    async def main() -> None:
        client = kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v2"))
        assert await client.is_server_live(server.http_url)
        assert await client.is_server_ready(server.http_url)
        assert await client.is_model_ready(server.http_url, "a")
        request = kserve.InferRequest(
            model_name="a", infer_inputs=[rows(binary)],
            request_outputs=[kserve.protocol.infer_type.RequestedOutput("OUTPUT", {"binary_data": binary})],
        )  # fmt: skip
        answer = await client.infer(server.http_url, request, model_name="a")
        np.testing.assert_array_equal(answer.outputs[0].as_numpy(), WANTED)
        await client.close()

    asyncio.run(main())


@pytest.mark.parametrize("binary", [False, True])
def test_grpc(server: Running, binary: bool) -> None:
    async def main() -> None:
        client = kserve.InferenceGRPCClient(server.grpc_address)
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("a")
        request = kserve.InferRequest(model_name="a", infer_inputs=[rows(binary)])
        answer = await client.infer(request)
        np.testing.assert_array_equal(answer.outputs[0].as_numpy(), WANTED)
        await client.close()

    asyncio.run(main())
