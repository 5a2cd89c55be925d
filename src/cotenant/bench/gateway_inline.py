"""The baseline of the gateway benchmark: a bare ASGI app that runs the model in its own process, under uvicorn."""

from __future__ import annotations

import sys
from typing import Any


def make_app(model: str) -> Any:
    """Return an app that answers a POST with the model's output, in the JSON of the Open Inference Protocol."""
    import numpy as np
    import onnxruntime as ort
    import orjson

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        entry = orjson.loads(body)["inputs"][0]
        x = np.array(entry["data"], np.float32).reshape(entry["shape"])
        (y,) = session.run(["y"], {"x": x})
        outputs = [{"name": "y", "datatype": "FP32", "shape": y.shape, "data": y.ravel()}]
        answer = orjson.dumps({"model_name": "m", "outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    return app


def main() -> None:
    """`python -m cotenant.bench.gateway_inline MODEL PORT`."""
    import uvicorn

    uvicorn.run(
        make_app(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]), loop="uvloop", http="httptools",
        log_level="warning", access_log=False,
    )  # fmt: skip


if __name__ == "__main__":
    main()
