"""Measures rates that need no GPU, only with the standard library's clients and the command line.

    python bench/independent/servers.py gateway     # requests/s of a small ONNX model, and of the model inside uvicorn
    python bench/independent/servers.py rayserve    # the same, and behind Ray Serve, one by one and by its own batching
    python bench/independent/servers.py webhook     # reviews/s over TLS
    python bench/independent/servers.py simulator   # seconds for 1,000 jobs, by the whole command

`cotenant` must be on the path, gateway needs onnx, onnxruntime and uvicorn, rayserve `serve` of Ray (its environment
needs onnxruntime, too). Prints a line per figure: median and range.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROUNDS, SECONDS, CONNECTIONS = 5, 4.0, 16

# the model inside a bare ASGI app, as a user without a model server would write it
INLINE = """
import json, sys
import numpy as np, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
async def app(scope, receive, send):
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    entry = json.loads(body)["inputs"][0]
    x = np.array(entry["data"], np.float32).reshape(entry["shape"])
    (y,) = session.run(None, {"x": x})
    output = {"name": "y", "shape": y.shape, "datatype": "FP32", "data": y.ravel().tolist()}
    text = json.dumps({"outputs": [output]}).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": text})
if __name__ == "__main__":
    import uvicorn
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="error", lifespan="off")
"""
# the model as Ray Serve's documentation writes a deployment: one class that takes single requests, and one with
# @serve.batch
RAY = """
import numpy as np, onnxruntime
from ray import serve
from starlette.requests import Request
class Model:
    def __init__(self, path):
        self.session = onnxruntime.InferenceSession(path)
    async def infer(self, x):
        return self.session.run(None, {"x": x})[0]
    async def __call__(self, request: Request):
        entry = (await request.json())["inputs"][0]
        y = await self.infer(np.array(entry["data"], np.float32).reshape(entry["shape"]))
        output = {"name": "y", "shape": list(y.shape), "datatype": "FP32", "data": y.ravel().tolist()}
        return {"outputs": [output]}
class Batching(Model):
    @serve.batch(max_batch_size=16, batch_wait_timeout_s=0.0)
    async def infer(self, rows):
        return np.split(self.session.run(None, {"x": np.concatenate(rows)})[0], len(rows))
deployment = serve.deployment(max_ongoing_requests=64)
def plain(args):
    return deployment(Model).bind(args["model"])
def batched(args):
    return deployment(Batching).bind(args["model"])
"""
SERVICES = """
gpus: {count: 1, model: cpu}
mechanism: cores
services:
  - {name: m, model: m, rate_rps: 2000, slo_ms: 200}
"""


def say(what: str, values: list[float]) -> None:
    print(
        f"{what}: {statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g}, {len(values)} values)",
        flush=True,
    )


def load(connect: Any, path: str, body: bytes) -> float:
    """Correct answers per second to connections that each wait for their answer. Other answers are printed."""
    others: list[int] = []
    counts, until = [0] * CONNECTIONS, time.monotonic() + SECONDS

    def ask(number: int) -> None:
        connection = connect()
        while time.monotonic() < until:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            if answer.status == 200:
                counts[number] += 1
            else:
                others.append(answer.status)
        connection.close()

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(CONNECTIONS)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if others:
        print(f"{len(others)} answers were {sorted(set(others))}", flush=True)
    return sum(counts) / (time.monotonic() - begin)


def model(path: Path) -> None:
    """Write a perceptron of 64 x 64."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weights = numpy_helper.from_array(np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    edges = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 64]) for n in "xy"]
    graph = helper.make_graph(nodes, "m", edges[:1], edges[1:], [weights])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def answered(connect: Any, path: str, body: bytes, process: subprocess.Popen[Any]) -> None:
    """Wait until a request is answered."""
    while True:
        assert process.poll() is None, process.args
        try:
            connection = connect()
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.5)


def prepare(folder: Path) -> dict[str, tuple[list[str], int]]:
    """Write the model and every server's files; returns commands and ports by server."""
    where = folder / "m" / "1" / "model.onnx"
    where.parent.mkdir(parents=True)
    model(where)
    (folder / "inline.py").write_text(INLINE)
    (folder / "raymodel.py").write_text(RAY)
    (folder / "services.yaml").write_text(SERVICES)
    ports = [free_port() for _ in range(3)]
    apps = [
        {"name": x, "route_prefix": f"/{x}", "import_path": f"raymodel:{x}", "args": {"model": str(where)}}
        for x in ("plain", "batched")
    ]
    ray = {"http_options": {"host": "127.0.0.1", "port": ports[2]}, "applications": apps}
    (folder / "ray.yaml").write_text(json.dumps(ray))  # a JSON document is also a YAML document
    serve = ["cotenant", "serve", str(folder / "services.yaml"), "--http", f"127.0.0.1:{ports[0]}", "--grpc", "none"]
    return {
        "cotenant": (serve, ports[0]),
        "inline": ([sys.executable, str(folder / "inline.py"), str(where), str(ports[1])], ports[1]),
        "ray": (["serve", "run", str(folder / "ray.yaml")], ports[2]),
    }


def compare(*rows: tuple[str, str, str]) -> None:
    """Measure rates in alternating rounds, and print the rate of the first row and its ratio to each other row.

    A row is (label, server, path). Servers that are not under load are stopped meanwhile, except Ray's processes,
    because `serve run` is only one of them. Ray's processes are never quite idle, which is to the disadvantage of other
    servers.
    """
    folder = Path(tempfile.mkdtemp(prefix="independent-"))
    commands = {name: row for name, row in prepare(folder).items() if name in {server for _, server, _ in rows}}
    body = json.dumps({"inputs": [{"name": "x", "shape": [1, 64], "datatype": "FP32", "data": [0.5] * 64}]}).encode()
    rates = dict[str, list[float]]()
    with open(folder / "log", "w") as log:
        doors = {
            name: lambda port=port: http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            for name, (_, port) in commands.items()
        }
        servers = dict[str, subprocess.Popen[Any]]()
        try:
            # Ray is started first, because it gives up if the machine is busy while it starts
            for _, name, path in reversed(rows):
                if name not in servers:
                    servers[name] = subprocess.Popen(commands[name][0], cwd=folder, stdout=log, stderr=log)
                answered(doors[name], path, body, servers[name])
            for _ in range(ROUNDS):
                for what, name, path in rows:
                    others = [p for n, p in servers.items() if n not in (name, "ray")]
                    for other in others:
                        other.send_signal(signal.SIGSTOP)
                    rates.setdefault(what, []).append(load(doors[name], path, body))
                    for other in others:
                        other.send_signal(signal.SIGCONT)
        finally:
            for name, process in servers.items():
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGINT if name == "ray" else signal.SIGTERM)
            for process in servers.values():
                process.wait()
    first = rows[0][0]
    for what in rates:
        say(f"requests/s {what}", rates[what])
    for what in list(rates)[1:]:
        say(f"{first} over {what}", [a / b for a, b in zip(rates[first], rates[what], strict=True)])


OURS = ("through cotenant serve, JSON", "cotenant", "/v2/models/m/infer")


def gateway() -> None:
    compare(OURS, ("of the model inside uvicorn", "inline", "/v2/models/m/infer"))


def rayserve() -> None:
    compare(OURS, ("behind Ray Serve", "ray", "/plain"), ("behind Ray Serve, which batches", "ray", "/batched"))


def webhook() -> None:
    folder = Path(tempfile.mkdtemp(prefix="independent-"))
    pair = [str(folder / "tls.key"), str(folder / "tls.crt")]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", pair[0], "-out", pair[1]],
        check=True, capture_output=True,
    )  # fmt: skip
    port = free_port()
    annotations = {"cotenant.dev/request": "30%", "cotenant.dev/limit": "60%", "cotenant.dev/memory": "8Gi"}
    containers = [{"name": "main", "image": "a", "env": [{"name": f"V{n}", "value": "x" * 40} for n in range(30)]}]
    pod = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "d", "annotations": annotations},
        "spec": {"containers": containers},
    }  # fmt: skip
    ask = {
        "uid": "u", "operation": "CREATE", "namespace": "d", "name": "p", "object": pod,
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
    }  # fmt: skip
    body = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": ask}).encode()
    context = ssl.create_default_context(cafile=pair[1])
    command = [
        "cotenant",
        "kube",
        "webhook",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--cert",
        pair[1],
        "--key",
        pair[0],
    ]

    def connect() -> http.client.HTTPConnection:
        return http.client.HTTPSConnection("localhost", port, context=context, timeout=60)

    with open(folder / "log", "w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            answered(connect, "/mutate", body, process)
            say(f"reviews/s over TLS, {len(body):,} B each", [load(connect, "/mutate", body) for _ in range(ROUNDS)])
        finally:
            process.terminate()


def simulator() -> None:
    folder = Path(tempfile.mkdtemp(prefix="independent-"))
    trace = str(folder / "jobs.csv")
    draw = ["cotenant", "trace", "generate", "--jobs", "1000", "--rate", "8/h", "--seed", "1", "--out", trace]
    subprocess.run(draw, check=True, capture_output=True)
    command = [
        "cotenant",
        "simulate",
        "--trace",
        trace,
        "--cluster",
        "16x8",
        "--ordering",
        "fifo",
        "--allotment",
        "tune",
    ]
    wall, own = [], []
    for _ in range(ROUNDS + 1):
        began, before = time.monotonic(), os.times()
        done = subprocess.run([*command, "--json"], check=True, capture_output=True, text=True)
        after = os.times()
        wall.append(time.monotonic() - began)
        own.append(after.children_user + after.children_system - before.children_user - before.children_system)
    answer = json.loads(done.stdout)
    assert answer["jobs_completed"] == 1000
    say("the whole command, 1,000 jobs, seconds", wall[1:])
    say("the same, CPU seconds", own[1:])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        {"gateway": gateway, "rayserve": rayserve, "webhook": webhook, "simulator": simulator}[name]()
