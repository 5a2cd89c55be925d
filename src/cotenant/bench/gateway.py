"""`cotenant bench gateway`: cost of a gateway with worker processes. Compares Cotenant with an ASGI app that runs the
model in its own process and, if it is installed, with Ray Serve. All use the same model, cores and client, in turn."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cotenant.bench.gateway_client import WARM_S
from cotenant.bench.onnx_model import perceptron
from cotenant.core.errors import WorkError
from cotenant.serving.llm.program import free_port

WIDTH, BATCH = 64, 16
BOOT_LIMIT_S = 120.0
PATH = "/v2/models/m/infer"
SYSTEMS = ("cotenant", "asgi-inline", "ray-serve")


def request_bytes(path: str, *, binary: bool) -> bytes:
    """Return a complete HTTP inference request with one item, whose tensor is a JSON list or binary data."""
    import numpy as np
    import orjson

    x = np.random.default_rng(0).standard_normal(WIDTH, np.float32)
    entry: dict[str, Any] = {"name": "x", "shape": [1, WIDTH], "datatype": "FP32"}
    extra = ""
    if binary:
        entry["parameters"] = {"binary_data_size": 4 * WIDTH}
        head = orjson.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}})
        body = head + x.tobytes()
        extra = f"inference-header-content-length: {len(head)}\r\n"
    else:
        entry["data"] = x.tolist()
        body = orjson.dumps({"inputs": [entry]})
    lines = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n{extra}"
    return f"{lines}content-length: {len(body)}\r\n\r\n".encode() + body


def grpc_message() -> bytes:
    """Return the inference request of `request_bytes` as a gRPC message (ModelInferRequest)."""
    import numpy as np

    from cotenant.serving.protocol.messages import classes

    x = np.random.default_rng(0).standard_normal(WIDTH, np.float32)
    message = classes()["ModelInferRequest"](model_name="m")
    message.inputs.add(name="x", datatype="FP32", shape=[1, WIDTH])
    message.raw_input_contents.append(x.tobytes())
    found: bytes = message.SerializeToString()
    return found


def services(folder: Path) -> Path:
    """Write a services file, its model, profile and plan (one core) to `folder`. Returns the services file's path."""
    version = folder / "models" / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").write_bytes(perceptron(WIDTH))
    cores = len(os.sched_getaffinity(0))
    share = 1.0 / cores
    profile = {
        "gpu": "cpu", "source": "made for the benchmark", "memory_mb": 1e6, "partitions": {"one": share},
        "models": {"m": {"memory_mb": 1, "latency_ms": {"one": {"1": 0.15, str(BATCH): 0.4}}}},
    }  # fmt: skip
    (folder / "profile.json").write_text(json.dumps(profile))
    plan = {
        "planner": "bench", "gpus": 1, "services": {"m": {"rate_rps": 1000.0}},
        "gpulets": [{
            "gpu": 0, "gpu_model": "cpu", "partition": "one", "percent": share * 100, "slot": 0, "duty_ms": 0.4,
            "seats": [{"service": "m", "model": "m", "batch": BATCH, "rate_rps": 1000.0}],
        }],
    }  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(plan))
    path = folder / "services.yaml"
    path.write_text(
        "gpus: {count: 1, model: cpu}\nmechanism: cores\nprofile: profile.json\n"
        "services:\n  - {name: m, model: models/m, slo_ms: 2000, rate_rps: 1000}\n"
    )
    return path


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def process(command: list[str], port: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server as a child process; yield it when it accepts connections on `port`. At the end it and all its
    children are killed.
    """
    log = folder / "log.txt"
    with log.open("wb") as sink:
        server = subprocess.Popen(command, stdout=sink, stderr=sink, start_new_session=True)
    try:
        end = time.monotonic() + BOOT_LIMIT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            except OSError:
                pass
            if server.poll() is not None or time.monotonic() > end:
                tail = log.read_text(errors="replace")[-500:]
                raise WorkError(f"{command[2]} did not start: {tail}")
            time.sleep(0.1)
        yield server
    finally:
        server.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(10)
        with suppress(ProcessLookupError):
            # the server has a session of its own, so this kills only the server and its child processes
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def drive(
    port: int, request: bytes, folder: Path, connections: int, seconds: float, client: str = "gateway_client"
) -> dict[str, float]:
    """Run the benchmark's client in a child process. Returns its figures."""
    file = folder / "request.bin"
    file.write_bytes(request)
    command = [sys.executable, "-m", f"cotenant.bench.{client}", "127.0.0.1", str(port), str(file)]
    done = subprocess.run(
        [*command, str(connections), str(seconds)], capture_output=True, text=True, timeout=seconds + 60, check=False
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [str(done.returncode)]
        raise WorkError(f"the client failed: {said[-1]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


@dataclass
class Target:
    """A running server, the request that `client` sends to it, and the process whose CPU time counts (None: none)."""

    port: int
    request: bytes
    folder: Path
    client: str = "gateway_client"
    pid: int | None = None
    rounds: list[dict[str, float]] = field(default_factory=list)

    def round(self, connections: int, seconds: float) -> None:
        """Run the client once against this server, and record its figures."""
        before = 0.0 if self.pid is None else cpu_s(self.pid)
        found = drive(self.port, self.request, self.folder, connections, seconds, self.client)
        if self.pid is not None:
            # the CPU time includes the client's warm-up, whose requests are not counted; their rate is assumed to be
            # that of the counted ones
            asked = max(1.0, found["rps"] * (seconds + WARM_S))
            found["cpu_us_per_request"] = (cpu_s(self.pid) - before) / asked * 1e6
        self.rounds.append(found)

    def summary(self) -> dict[str, float]:
        """Return the medians of the figures over the rounds; failures are added up."""
        out = {key: statistics.median(r[key] for r in self.rounds) for key in self.rounds[0]}
        out["failed"] = sum(r["failed"] for r in self.rounds)
        return out


@contextmanager
def _cotenant(folder: Path) -> Iterator[dict[str, Target]]:
    path = services(folder)
    port, grpc = free_port(), free_port()
    command = [
        sys.executable, "-m", "cotenant.cli.main", "serve", str(path), "--plan", str(folder / "plan.json"), "--http",
        f"127.0.0.1:{port}", "--grpc", f"127.0.0.1:{grpc}",
    ]  # fmt: skip
    with process(command, port, folder) as server:
        yield {
            "cotenant": Target(port, request_bytes(PATH, binary=False), folder, pid=server.pid),
            "cotenant binary": Target(port, request_bytes(PATH, binary=True), folder, pid=server.pid),
            "cotenant grpc": Target(grpc, grpc_message(), folder, "gateway_grpc", server.pid),
        }


@contextmanager
def _inline(folder: Path) -> Iterator[dict[str, Target]]:
    model, port = folder / "model.onnx", free_port()
    model.write_bytes(perceptron(WIDTH))
    command = [sys.executable, "-m", "cotenant.bench.gateway_inline", str(model), str(port)]
    with process(command, port, folder) as server:
        yield {"asgi-inline": Target(port, request_bytes(PATH, binary=False), folder, pid=server.pid)}


@contextmanager
def _ray(folder: Path) -> Iterator[dict[str, Target]]:
    model, port = folder / "model.onnx", free_port()
    model.write_bytes(perceptron(WIDTH))
    command = [sys.executable, "-m", "cotenant.bench.gateway_ray", str(model), str(port)]
    with process(command, port, folder):
        end = time.monotonic() + BOOT_LIMIT_S
        while "ready" not in (folder / "log.txt").read_text(errors="replace"):
            if time.monotonic() > end:
                raise WorkError("Ray Serve was not ready in time")
            time.sleep(0.2)
        yield {"ray-serve": Target(port, request_bytes(PATH, binary=False), folder)}


def measure(
    systems: tuple[str, ...] = SYSTEMS, connections: int = 16, seconds: float = 2.0, rounds: int = 3,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Measure each system and return its figures: medians of rounds that alternate between systems. Systems that are
    not installed are left out. `ratio` is Cotenant's requests per second over those of each other system.
    """
    boots = {"cotenant": _cotenant, "asgi-inline": _inline, "ray-serve": _ray}
    needed = {"asgi-inline": "uvicorn", "ray-serve": "ray"}
    found: dict[str, Any] = {
        "connections": connections, "seconds": seconds, "rounds": rounds, "cores": len(os.sched_getaffinity(0))
    }  # fmt: skip
    chosen = []
    for name in systems:
        if name in needed and importlib.util.find_spec(needed[name]) is None:
            progress(f"{name} is left out: {needed[name]} is not installed")
        else:
            chosen.append(name)
    # Ray's own processes are never quite idle, so Ray is measured after the other systems have stopped
    for group in ([x for x in chosen if x != "ray-serve"], [x for x in chosen if x == "ray-serve"]):
        with ExitStack() as stack:
            targets: dict[str, Target] = {}
            for name in group:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cotenant-bench-")))
                progress(f"starting {name}")
                targets |= stack.enter_context(boots[name](folder))
            for _ in range(rounds):
                for name, target in targets.items():
                    target.round(connections, seconds)
                    progress(f"{name}: {target.rounds[-1]['rps']:.0f} requests/s")
            found |= {name: target.summary() for name, target in targets.items()}
    for form in ("binary", "grpc"):
        if f"cotenant {form}" in found:
            found["cotenant"][form] = found.pop(f"cotenant {form}")
    if "cotenant" in found:
        others = [name for name in chosen if name != "cotenant"]
        found["ratio"] = {name: found["cotenant"]["rps"] / found[name]["rps"] for name in others}
    return found
