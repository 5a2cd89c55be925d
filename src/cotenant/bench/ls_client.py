"""The latency-sensitive service of `cotenant bench colocation`: `python -m cotenant.bench.ls_client BACKEND BATCH`.

Protocol: prints `ready NAME`; then `floor FOLDER UUID` joins the floor of an agent, and each line
`run SECONDS RATE SEED FLOOR COPY` serves Poisson arrivals and prints one JSON object
{"latency_ms": [...], "service_ms": [...], "active_s", "begin_ns", "end_ns"}. Latency counts from the scheduled arrival.
FLOOR 1: raise it while a request is served; COPY 1: each request brings its input from pinned host memory.

ResNet-50 in fp16 as one CUDA graph; on the software GPU a graph of 60 kernels that take 1.03 ms together.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cotenant.node.floor_client import Holder, NullFloor, join_floor

SPIN_S = 0.0004
SOFT_KERNELS_NS = [17_200] * 60
SOFT_SMS = 60  # that each of them fills: on 32 SMs the service takes about twice as long, as on the card


def poisson_arrivals(seconds: float, rate_rps: float, seed: int) -> list[float]:
    """Arrival times in seconds, exponential gaps."""
    draw = random.Random(seed)
    times: list[float] = []
    at = draw.expovariate(rate_rps)
    while at < seconds:
        times.append(at)
        at += draw.expovariate(rate_rps)
    return times


def serve(request: Callable[[bool], None], floor: Holder, arrivals: list[float], copy: bool) -> dict[str, Any]:
    """Serve the arrivals one after the other; the floor is up while a request is served or waits."""
    latency_ms: list[float] = []
    service_ms: list[float] = []
    active_s = 0.0
    begin_ns = time.monotonic_ns()
    begin = time.monotonic()
    for number, at in enumerate(arrivals):
        due = begin + at
        while (left := due - time.monotonic()) > 0:
            if left > SPIN_S:
                time.sleep(left - SPIN_S / 2)
        floor.raise_()
        started = time.monotonic()
        request(copy)
        ended = time.monotonic()
        if number + 1 == len(arrivals) or begin + arrivals[number + 1] > ended:
            floor.lower()
        latency_ms.append((ended - due) * 1e3)
        service_ms.append((ended - started) * 1e3)
        active_s += ended - started
    return {
        "latency_ms": latency_ms,
        "service_ms": service_ms,
        "active_s": active_s,
        "begin_ns": begin_ns,
        "end_ns": time.monotonic_ns(),
    }


def torch_service(batch: int) -> tuple[str, Callable[[bool], None]]:
    """ResNet-50 in fp16, captured once."""
    import torch

    from cotenant.bench.networks import resnet50

    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    net = resnet50(torch).cuda().half().eval().to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.half).to(memory_format=torch.channels_last)
    host = torch.randn(batch, 3, 224, 224).half().to(memory_format=torch.channels_last).pin_memory()
    stream = torch.cuda.Stream(priority=-5)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(5):
            net(images)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            net(images)

    def request(copy: bool) -> None:
        with torch.cuda.stream(stream):
            if copy:
                images.copy_(host, non_blocking=True)
            graph.replay()
        stream.synchronize()

    return torch.cuda.get_device_name(0), request


def driver_service(batch: int) -> tuple[str, Callable[[bool], None]]:
    """The same on the bare driver API."""
    import ctypes

    from cotenant.bench.driver import Driver

    cuda = Driver(os.environ.get("COTENANT_BENCH_LIBRARY", "libcuda.so.1"))
    stream = cuda.stream()
    graph = cuda.graph(SOFT_KERNELS_NS, stream, work="service")
    size = batch * 3 * 224 * 224 * 2
    device, host = cuda.buffers(size)

    def request(copy: bool) -> None:
        if copy:
            cuda.call("cuMemcpyHtoDAsync_v2", device, host, ctypes.c_size_t(size), stream)
        cuda.call("cuGraphLaunch", graph, stream)
        cuda.call("cuStreamSynchronize", stream)

    return cuda.name, request


def main(arguments: list[str]) -> int:
    """Set up, say so, serve what is asked on standard input."""
    backend, batch = arguments[0], int(arguments[1])
    name, request = torch_service(batch) if backend == "torch" else driver_service(batch)
    for _ in range(20):
        request(True)
    print(f"ready {name}", flush=True)
    floor: Holder = NullFloor()
    for line in sys.stdin:
        words = line.split()
        if words[0] == "floor":
            floor = join_floor(Path(words[1]), words[2])
            print("{}", flush=True)
        elif words[0] == "run":
            seconds, rate, seed, raises, copy = float(words[1]), float(words[2]), int(words[3]), words[4], words[5]
            used = floor if raises == "1" else NullFloor()
            print(json.dumps(serve(request, used, poisson_arrivals(seconds, rate, seed), copy == "1")), flush=True)
    floor.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
