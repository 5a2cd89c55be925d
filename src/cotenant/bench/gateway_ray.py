"""Ray Serve in the gateway benchmark: one replica that runs the model, behind Ray's own HTTP proxy."""

from __future__ import annotations

import sys
import time
from typing import Any


def main() -> None:
    """`python -m cotenant.bench.gateway_ray MODEL PORT`: serves until it is killed."""
    model, port = sys.argv[1], int(sys.argv[2])
    import ray
    from ray import serve

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})

    @serve.deployment(num_replicas=1, max_ongoing_requests=64, ray_actor_options={"num_cpus": 0.5})
    class Model:
        def __init__(self) -> None:
            import onnxruntime as ort

            options = ort.SessionOptions()
            options.intra_op_num_threads = 1
            self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

        async def __call__(self, request: Any) -> Any:
            import numpy as np
            import orjson
            from starlette.responses import Response

            entry = orjson.loads(await request.body())["inputs"][0]
            x = np.array(entry["data"], np.float32).reshape(entry["shape"])
            (y,) = self.session.run(["y"], {"x": x})
            outputs = [{"name": "y", "datatype": "FP32", "shape": y.shape, "data": y.ravel()}]
            answer = orjson.dumps({"model_name": "m", "outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)
            return Response(answer, media_type="application/json")

    serve.run(Model.bind(), name="m", route_prefix="/v2/models/m/infer")  # type: ignore[attr-defined]
    print("ready", flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
