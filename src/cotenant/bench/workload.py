"""Programs that the benchmarks run as tenants: `python -m cotenant.bench.workload KIND`.

Protocol: prints `ready NAME` once the GPU is set up; then each line `run SECONDS` on standard input runs one block and
prints one JSON object {"count", "begin_ns", "end_ns", "marks": [[ns, count], ...]}. End of input ends the program.

busy      GPU-bound: long kernels, six in flight (torch: bf16 products of 8192^3)
training  a step of copies, kernels and a wait, with some host time (torch: a small convolutional network)
launch    500 tiny kernels, then a wait
graph     replay of a captured graph of 60 kernels
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

KINDS = ("busy", "training", "launch", "graph")
MARK_NS = 20_000_000
DEPTH = 6


def run_block(step: Callable[[], int], finish: Callable[[], int], seconds: float) -> dict[str, Any]:
    """Repeat `step` (returns units of work known to be done) for that long; `finish` waits for the rest."""
    begin_ns = time.monotonic_ns()
    until_ns = begin_ns + round(seconds * 1e9)
    count = 0
    marks: list[tuple[int, int]] = []
    next_ns = begin_ns + MARK_NS
    while True:
        count += step()
        now_ns = time.monotonic_ns()
        if now_ns >= next_ns:
            marks.append((now_ns, count))
            next_ns = now_ns + MARK_NS
        if now_ns >= until_ns:
            break
    count += finish()
    return {"count": count, "begin_ns": begin_ns, "end_ns": time.monotonic_ns(), "marks": marks}


def _pipelined(start: Callable[[], None], record: Callable[[int], None], wait: Callable[[int], None]) -> Any:
    """Step and finish of a loop that keeps DEPTH units in flight and counts what has ended."""
    state = {"started": 0, "ended": 0}

    def step() -> int:
        start()
        record(state["started"] % DEPTH)
        state["started"] += 1
        if state["started"] - state["ended"] < DEPTH:
            return 0
        wait(state["ended"] % DEPTH)
        state["ended"] += 1
        return 1

    def finish() -> int:
        left = state["started"] - state["ended"]
        while state["ended"] < state["started"]:
            wait(state["ended"] % DEPTH)
            state["ended"] += 1
        return left

    return step, finish


def driver_workload(kind: str, kernel_ns: int) -> tuple[str, Any, Any]:
    """A workload on the bare driver API. Returns the GPU's name, step and finish."""
    from cotenant.bench.driver import Driver

    cuda = Driver(os.environ.get("COTENANT_BENCH_LIBRARY", "libcuda.so.1"))
    if kind == "busy":
        events = [cuda.event() for _ in range(DEPTH)]
        step, finish = _pipelined(
            lambda: cuda.launch(kernel_ns), lambda i: cuda.record(events[i]), lambda i: cuda.wait(events[i])
        )
        return cuda.name, step, finish
    if kind == "training":
        size = 1 << 20
        device, host = cuda.buffers(size)

        def train() -> int:
            cuda.call("cuMemcpyHtoD_v2", device, host, ctypes.c_size_t(size))
            for _ in range(40):
                cuda.launch(100_000)
            cuda.synchronise()
            sum(range(4000))  # host work between two steps, as a data loader does
            return 1

        return cuda.name, train, lambda: 0
    if kind == "launch":

        def launches() -> int:
            for _ in range(500):
                cuda.launch(1_000)
            cuda.synchronise()
            return 1

        return cuda.name, launches, lambda: 0
    stream = cuda.stream()
    graph = cuda.graph([20_000] * 60, stream)

    def replay() -> int:
        cuda.call("cuGraphLaunch", graph, stream)
        cuda.call("cuStreamSynchronize", stream)
        return 1

    return cuda.name, replay, lambda: 0


def torch_workload(kind: str) -> tuple[str, Any, Any]:
    """The same kinds with PyTorch on a real GPU."""
    import torch

    torch.manual_seed(0)
    name = torch.cuda.get_device_name(0)
    if kind == "busy":
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(a)
        events = [torch.cuda.Event() for _ in range(DEPTH)]
        step, finish = _pipelined(
            lambda: torch.mm(a, a, out=out), lambda i: events[i].record(), lambda i: events[i].synchronize()
        )
        return name, step, finish
    if kind == "launch":
        x = torch.zeros(64, 64, device="cuda")

        def launches() -> int:
            for _ in range(500):
                x.add_(1.0)
            torch.cuda.synchronize()
            return 1

        return name, launches, lambda: 0
    convolutions = [torch.nn.Conv2d(3 if layer == 0 else 64, 64, 3, padding=1) for layer in range(8)]
    net = torch.nn.Sequential(
        *[torch.nn.Sequential(convolution, torch.nn.ReLU()) for convolution in convolutions],
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 10),
    ).cuda()
    if kind == "graph":
        net = net.eval().half()
        batch = torch.randn(16, 3, 64, 64, device="cuda", dtype=torch.half)
        with torch.no_grad():
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                for _ in range(3):
                    net(batch)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                net(batch)

        def replay() -> int:
            graph.replay()
            torch.cuda.synchronize()
            return 1

        return name, replay, lambda: 0
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01)
    images = torch.randn(64, 3, 64, 64).pin_memory()
    labels = torch.randint(0, 10, (64,), device="cuda")

    def train() -> int:
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(net(images.cuda(non_blocking=True)), labels)
        loss.backward()
        optimiser.step()
        loss.item()
        return 1

    return name, train, lambda: 0


def orders() -> Iterator[float]:
    """Lengths in seconds of the blocks that are asked for on standard input."""
    for line in sys.stdin:
        words = line.split()
        if len(words) == 2 and words[0] == "run":
            yield float(words[1])


def main(arguments: list[str]) -> int:
    """Set up, say so, run blocks."""
    kind, backend, kernel_ns = arguments[0], arguments[1], int(arguments[2])
    if backend == "torch":
        name, step, finish = torch_workload(kind)
    else:
        name, step, finish = driver_workload(kind, kernel_ns)
    run_block(step, finish, 0.05)  # warm up: lazy loading, first turn
    print(f"ready {name}", flush=True)
    for seconds in orders():
        print(json.dumps(run_block(step, finish, seconds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
