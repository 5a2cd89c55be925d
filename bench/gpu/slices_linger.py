"""The bench's service with a kernel that outlasts each request: `python slices_linger.py BACKEND BATCH`.

A request that has waited for another finds its queue empty for the moment between the two, and the hardware goes on to
the next group: a switch of its own. Here a kernel of one thread block runs beside each request, on a stream of its own,
and some microseconds longer, so that the group keeps the GPU for a request that waits. (One that begins when the
request ends does not help: the moment between the two is enough for the hardware.)
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
    stream, beside = torch.cuda.Stream(priority=-5), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(5):
            net(images)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            net(images)

    def length_us(work: Callable[[], object]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        found = []
        for _ in range(9):
            begin.record()
            work()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) * 1e3)
        return sorted(found)[len(found) // 2]

    cycles_per_us = 2_000_000 / length_us(lambda: torch.cuda._sleep(2_000_000))
    request_us = length_us(graph.replay)

    def request(linger_us: int) -> None:
        if linger_us:
            with torch.cuda.stream(beside):
                torch.cuda._sleep(int((request_us + linger_us) * cycles_per_us))
        with torch.cuda.stream(stream):
            graph.replay()
        stream.synchronize()

    return request


def driver_request() -> Callable[[int], None]:
    """The same on the bare driver API, for the software GPU."""
    from cotenant.bench.driver import Driver

    cuda = Driver()
    stream, beside = cuda.stream(), cuda.stream()
    graph = cuda.graph(SOFT_KERNELS_NS, stream, work="service")
    holding: dict[int, object] = {}

    def request(linger_us: int) -> None:
        if linger_us:
            if linger_us not in holding:
                holding[linger_us] = cuda.graph([sum(SOFT_KERNELS_NS) + linger_us * 1000], beside)
            cuda.call("cuGraphLaunch", holding[linger_us], beside)
        cuda.call("cuGraphLaunch", graph, stream)
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
