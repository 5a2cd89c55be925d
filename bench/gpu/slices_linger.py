"""The bench's service with a kernel that lingers behind each request: `python slices_linger.py BACKEND BATCH`.

A request that has waited for another finds its queue empty for the moment between the two, and the hardware goes on to
the next group: a switch of its own. Here a kernel of one thread block stays on the GPU for some microseconds after each
request, on a stream of its own, so that the group keeps the GPU for a request that waits.
Protocol as `cotenant.bench.ls_client`, without a floor: `run SECONDS RATE SEED LINGER_US`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from cotenant.agent.gate.client import NullFloor
from cotenant.bench.ls_client import SOFT_KERNELS_NS, poisson_arrivals, serve
from cotenant.bench.workload import in_a_sentence


def torch_request(batch: int) -> Callable[[int], None]:
    """ResNet-50 in fp16 as one graph; the kernel behind it counts clock cycles."""
    import torch

    from cotenant.bench.networks import resnet50

    torch.manual_seed(0)
    net = resnet50(torch).cuda().half().eval().to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.half).to(memory_format=torch.channels_last)
    stream, behind = torch.cuda.Stream(priority=-5), torch.cuda.Stream()
    graph, done = torch.cuda.CUDAGraph(), torch.cuda.Event()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(5):
            net(images)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            net(images)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.cuda._sleep(10_000_000)
    end.record()
    end.synchronize()
    cycles_per_us = 10_000_000 / (begin.elapsed_time(end) * 1e3)

    def request(linger_us: int) -> None:
        with torch.cuda.stream(stream):
            graph.replay()
        if linger_us:
            done.record(stream)
            behind.wait_event(done)
            with torch.cuda.stream(behind):
                torch.cuda._sleep(int(linger_us * cycles_per_us))
        stream.synchronize()

    return request


def driver_request() -> Callable[[int], None]:
    """The same on the bare driver API, for the software GPU."""
    from cotenant.bench.driver import Driver

    cuda = Driver()
    stream, behind = cuda.stream(), cuda.stream()
    graph = cuda.graph(SOFT_KERNELS_NS, stream, work="service")
    done = cuda.event(timing=False)
    lingering: dict[int, object] = {}

    def request(linger_us: int) -> None:
        cuda.call("cuGraphLaunch", graph, stream)
        if linger_us:
            if linger_us not in lingering:
                lingering[linger_us] = cuda.graph([linger_us * 1000], behind)
            cuda.record(done, stream)
            cuda.call("cuStreamWaitEvent", behind, done, 0)
            cuda.call("cuGraphLaunch", lingering[linger_us], behind)
        cuda.call("cuStreamSynchronize", stream)

    return request


def main(arguments: list[str]) -> int:
    """Set up, say so, serve what is asked on standard input."""
    backend, batch = arguments
    request = torch_request(int(batch)) if backend == "torch" else driver_request()
    for _ in range(20):
        request(50)
    print("ready lingering", flush=True)
    for line in sys.stdin:
        _, seconds, rate, seed, linger_us = line.split()
        arrivals = poisson_arrivals(float(seconds), float(rate), int(seed))
        found = serve(lambda _, us=int(linger_us): request(us), NullFloor(), arrivals, False)  # type: ignore[misc]
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(in_a_sentence(main))
