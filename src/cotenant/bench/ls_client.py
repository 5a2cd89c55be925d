"""The latency-sensitive service of `cotenant bench colocation`: `python -m cotenant.bench.ls_client BACKEND BATCH`.

BACKEND is `torch` or `driver`, and BATCH the number of images in a request. With `torch` the network is ResNet-50 in
fp16 as one CUDA graph; with `driver`, for the software GPU, it is a graph of 60 kernels, 1.12 ms in all.

The client prints `ready NAME`, the name of the GPU, and then executes each line of its input:

- `floor FOLDER UUID [CLASS]` connects the client to the agent that runs in FOLDER, so that runs with FLOOR 1 can report
  activity on the GPU UUID to it, as work of class CLASS. Prints {}.
- `run SECONDS RATE SEED FLOOR COPY [STAGES]` serves Poisson arrivals and prints one JSON object {"latency_ms": [...],
  "service_ms": [...], "late_ms": [...], "active_s", "begin_ns", "end_ns"}. With FLOOR 1 the client reports activity
  while it serves a request. With COPY 1 each request copies its input from pinned host memory.

"latency_ms" counts from the scheduled arrival. "late_ms" is the time from when a request could begin (it was due and
the previous one had ended) until it began; it is long if the host paused the client. With STAGES 1 the network runs as
two graphs between events, and "stages_ms" has [submit, first, rest] for each request: the durations of the host's
launches, of the first kernels (with the wait for work in flight), and of the other kernels.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotenant.abi.floor import WorkClass
from cotenant.agent.gate.client import Holder, NullFloor, join_floor
from cotenant.bench.workload import in_a_sentence
from cotenant.core.errors import InputError

SPIN_S = 0.0004
# lengths of the service's kernels; together with launch and completion they take 1.13 ms, as the service does on an
# H100 under MPS
SOFT_KERNELS_NS = [18_700] * 60
# number of SMs that each kernel fills; on only 32 SMs the service takes about twice as long, which is also the case on
# an H100
SOFT_SMS = 60


def poisson_arrivals(seconds: float, rate_rps: float, seed: int) -> list[float]:
    """Return the arrival times of requests in seconds, with exponential gaps."""
    draw = random.Random(seed)
    times: list[float] = []
    at = draw.expovariate(rate_rps)
    while at < seconds:
        times.append(at)
        at += draw.expovariate(rate_rps)
    return times


@dataclass
class Service:
    """A neural network on the GPU. `request(copy)` serves one request; `staged(copy)` also returns its stages in ms."""

    name: str
    request: Callable[[bool], None]
    staged: Callable[[bool], list[float]]


def serve(
    request: Callable[[bool], Any],
    floor: Holder,
    arrivals: list[float],
    copy: bool,
    work_class: WorkClass = WorkClass.UNKNOWN,
) -> dict[str, Any]:
    """Serve one request at a time, in the order of `arrivals` (seconds after the start). The LS-activity flag is set
    while a request is being served or waits.
    """
    latency_ms: list[float] = []
    service_ms: list[float] = []
    late_ms: list[float] = []
    stages_ms: list[Any] = []
    active_s = 0.0
    begin_ns = time.monotonic_ns()
    begin = ended = time.monotonic()
    for number, at in enumerate(arrivals):
        due = begin + at
        while (left := due - time.monotonic()) > 0:
            if left > SPIN_S:
                time.sleep(left - SPIN_S / 2)
        floor.raise_(work_class)
        started = time.monotonic()
        late_ms.append((started - max(due, ended)) * 1e3)
        stages_ms.append(request(copy))
        ended = time.monotonic()
        if number + 1 == len(arrivals) or begin + arrivals[number + 1] > ended:
            floor.lower()
        latency_ms.append((ended - due) * 1e3)
        service_ms.append((ended - started) * 1e3)
        active_s += ended - started
    return {
        "latency_ms": latency_ms,
        "service_ms": service_ms,
        "late_ms": late_ms,
        "active_s": active_s,
        "begin_ns": begin_ns,
        "end_ns": time.monotonic_ns(),
    } | ({"stages_ms": stages_ms} if stages_ms and stages_ms[0] else {})


def torch_service(batch: int) -> Service:
    """Return a service of ResNet-50 in fp16, captured as one graph, and as two: the first convolution, and the rest."""
    import torch

    from cotenant.bench.networks import resnet50

    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    net = resnet50(torch).cuda().half().eval().to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.half).to(memory_format=torch.channels_last)
    host = torch.randn(batch, 3, 224, 224).half().to(memory_format=torch.channels_last).pin_memory()
    stream = torch.cuda.Stream(priority=-5)
    whole, first, rest = (torch.cuda.CUDAGraph() for _ in range(3))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(5):
            net(images)
        stream.synchronize()
        with torch.cuda.graph(whole, stream=stream):
            net(images)
        with torch.cuda.graph(first, stream=stream):
            middle = net[0](images)
        with torch.cuda.graph(rest, stream=stream):
            net[1:](middle)

    def request(copy: bool) -> None:
        with torch.cuda.stream(stream):
            if copy:
                images.copy_(host, non_blocking=True)
            whole.replay()
        stream.synchronize()

    def staged(copy: bool) -> list[float]:
        began = time.monotonic()
        with torch.cuda.stream(stream):
            if copy:
                images.copy_(host, non_blocking=True)
            events[0].record()
            first.replay()
            events[1].record()
            rest.replay()
            events[2].record()
        launched = time.monotonic()
        stream.synchronize()
        return [(launched - began) * 1e3, events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])]

    return Service(torch.cuda.get_device_name(0), request, staged)


def driver_service(batch: int) -> Service:
    """Return the latency-sensitive service on the plain driver API, with kernels of known length."""
    from cotenant.bench.driver import Driver

    cuda = Driver()
    stream = cuda.stream()
    whole = cuda.graph(SOFT_KERNELS_NS, stream, work="service")
    first = cuda.graph(SOFT_KERNELS_NS[:1], stream, work="service")
    rest = cuda.graph(SOFT_KERNELS_NS[1:], stream, work="service")
    events = [cuda.event(timing=True) for _ in range(3)]
    size = batch * 3 * 224 * 224 * 2
    device, host = cuda.buffers(size)

    def send(copy: bool) -> None:
        if copy:
            cuda.call("cuMemcpyHtoDAsync_v2", device, host, ctypes.c_size_t(size), stream)

    def request(copy: bool) -> None:
        send(copy)
        cuda.call("cuGraphLaunch", whole, stream)
        cuda.call("cuStreamSynchronize", stream)

    def staged(copy: bool) -> list[float]:
        began = time.monotonic()
        send(copy)
        cuda.record(events[0], stream)
        cuda.call("cuGraphLaunch", first, stream)
        cuda.record(events[1], stream)
        cuda.call("cuGraphLaunch", rest, stream)
        cuda.record(events[2], stream)
        launched = time.monotonic()
        cuda.call("cuStreamSynchronize", stream)
        return [(launched - began) * 1e3, cuda.elapsed_ms(events[0], events[1]), cuda.elapsed_ms(events[1], events[2])]

    return Service(cuda.name, request, staged)


def main(arguments: list[str]) -> int:
    """Set up the service's network on the GPU, print `ready`, then execute the lines of standard input."""
    if len(arguments) != 2 or not arguments[1].isdecimal() or not 1 <= int(arguments[1]) <= 1024:
        raise InputError("two arguments are needed, such as driver 4: driver or torch, and the batch")
    backend, batch = arguments[0], int(arguments[1])
    service = torch_service(batch) if backend == "torch" else driver_service(batch)
    for _ in range(20):
        service.request(True)
        service.staged(True)
    print(f"ready {service.name}", flush=True)
    floor: Holder = NullFloor()
    shown = WorkClass.UNKNOWN
    for line in sys.stdin:
        words = line.split()
        if words[0] == "floor":
            floor = join_floor(Path(words[1]), words[2])
            shown = WorkClass[words[3].upper()] if words[3:] else WorkClass.UNKNOWN
            print("{}", flush=True)
        elif words[0] == "run":
            seconds, rate, seed, raises, copy = float(words[1]), float(words[2]), int(words[3]), words[4], words[5]
            used = floor if raises == "1" else NullFloor()
            request = service.staged if words[6:] == ["1"] else service.request
            arrivals = poisson_arrivals(seconds, rate, seed)
            print(json.dumps(serve(request, used, arrivals, copy == "1", shown)), flush=True)
    floor.close()
    return 0


if __name__ == "__main__":
    sys.exit(in_a_sentence(main))
