"""Programs that the benchmarks run as tenants: `python -m cotenant.bench.workload [KIND [driver|torch [NS]]]`.

NS is the duration of a kernel of kind `busy` with `driver`, in ns.

Protocol: prints `ready NAME` (of the GPU) once the GPU is set up. Then each line `run SECONDS` on standard input runs
one block, in which the program repeats its work for that time, and prints one JSON object {"count", "busy_ns",
"begin_ns", "end_ns", "marks": [[ns, count, busy_ns], ...]}. "count" is the number of units of work, "busy_ns" their GPU
time (0 for kinds other than `busy`); "marks" has both as they were at times during the block, and is left out on a
terminal. `steps SECONDS` does the same and adds "steps_ns", the duration of each step. End of input ends the program.

busy      GPU-bound: long kernels, six in flight (torch: bf16 products of 8192^3)
training  steps of copies, kernels, a wait and some host work (torch: a small convolutional network)
launch    500 tiny kernels, then a wait
graph     replay of a captured graph of 60 kernels
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cotenant.core.errors import InputError, WorkError

KINDS = ("busy", "training", "launch", "graph")
# environment variable with the core on which the launching thread runs after the setup
LAUNCH_CORE = "COTENANT_BENCH_CORE"
MARK_NS = 10_000_000
DEPTH = 6

Done = tuple[int, int]  # number of units of work that were done, and their GPU time in ns


def run_block(
    step: Callable[[], Done], finish: Callable[[], Done], seconds: float, steps_ns: list[int] | None = None
) -> dict[str, Any]:
    """Repeat the workload's `step` for `seconds`, then call `finish`, which waits for work that is still in flight.
    Both return the work completed since the last call. `steps_ns` gets the duration of each step.
    """
    last_ns = begin_ns = time.monotonic_ns()
    until_ns = begin_ns + round(seconds * 1e9)
    count = busy_ns = 0
    marks: list[tuple[int, int, int]] = []
    next_ns = begin_ns + MARK_NS
    while True:
        units, used_ns = step()
        count += units
        busy_ns += used_ns
        now_ns = time.monotonic_ns()
        if steps_ns is not None:
            steps_ns.append(now_ns - last_ns)
            last_ns = now_ns
        if now_ns >= next_ns:
            marks.append((now_ns, count, busy_ns))
            next_ns = now_ns + MARK_NS
        if now_ns >= until_ns:
            break
    units, used_ns = finish()
    return {
        "count": count + units,
        "busy_ns": busy_ns + used_ns,
        "begin_ns": begin_ns,
        "end_ns": time.monotonic_ns(),
        "marks": marks,
    }


def pipelined(start: Callable[[int], None], wait: Callable[[int], int], depth: int = DEPTH, size: int = 1) -> Any:
    """Return functions `step` and `finish` that keep `depth` pieces of work in flight. `wait` returns the GPU time of
    its piece. `size`: units of work of a piece.
    """
    state = {"started": 0, "ended": 0}

    def end_one() -> int:
        used_ns = wait(state["ended"] % depth)
        state["ended"] += 1
        return used_ns

    def step() -> Done:
        start(state["started"] % depth)
        state["started"] += 1
        if state["started"] - state["ended"] < depth:
            return 0, 0
        return size, end_one()

    def finish() -> Done:
        left = state["started"] - state["ended"]
        return left * size, sum(end_one() for _ in range(left))

    return step, finish


class GpuTime:
    """Computes the GPU time of equal units of work from pairs of events.

    The first event of a pair is recorded before the launch waits for the tenant's turn, so a pair may include that
    wait. A time of more than 1.3 times the median of the last units therefore counts as that median.
    """

    def __init__(self) -> None:
        self._last: deque[int] = deque(maxlen=31)

    def unit(self, elapsed_ns: int) -> int:
        """Return the GPU time in ns of a unit whose events are `elapsed_ns` apart."""
        if self._last:
            median_ns = sorted(self._last)[len(self._last) // 2]
            if elapsed_ns > 1.3 * median_ns:
                return median_ns
        self._last.append(elapsed_ns)
        return elapsed_ns


def _nothing() -> Done:
    return 0, 0


def driver_workload(kind: str, kernel_ns: int) -> tuple[str, Any, Any]:
    """Set up a workload on the plain driver API. Returns the GPU's name and the functions `step` and `finish`."""
    from cotenant.bench.driver import Driver

    cuda = Driver()
    if kind == "busy":
        events = [cuda.event() for _ in range(DEPTH)]

        def start(index: int) -> None:
            cuda.launch(kernel_ns)
            cuda.record(events[index])

        def wait(index: int) -> int:
            cuda.wait(events[index])
            return kernel_ns

        return cuda.name, *pipelined(start, wait)
    if kind == "training":
        size = 1 << 20
        device, host = cuda.buffers(size)

        def train() -> Done:
            cuda.call("cuMemcpyHtoD_v2", device, host, ctypes.c_size_t(size))
            for _ in range(40):
                cuda.launch(100_000)
            cuda.synchronise()
            sum(range(4000))  # this takes the time of a data loader's work between two steps
            return 1, 0

        return cuda.name, train, _nothing
    if kind == "launch":

        def launches() -> Done:
            for _ in range(500):
                cuda.launch(1_000)
            cuda.synchronise()
            return 1, 0

        return cuda.name, launches, _nothing
    stream = cuda.stream()
    graph = cuda.graph([20_000] * 60, stream)

    def replay() -> Done:
        cuda.call("cuGraphLaunch", graph, stream)
        cuda.call("cuStreamSynchronize", stream)
        return 1, 0

    return cuda.name, replay, _nothing


def _torch_products(torch: Any) -> Any:
    """Return functions `step` and `finish` that run bf16 products of 8192^3 and return their GPU time."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(DEPTH)]
    gpu_time = GpuTime()

    def start(index: int) -> None:
        events[index][0].record()
        torch.mm(a, a, out=out)
        events[index][1].record()

    def wait(index: int) -> int:
        first, last = events[index]
        last.synchronize()
        return gpu_time.unit(round(first.elapsed_time(last) * 1e6))

    return pipelined(start, wait)


def torch_workload(kind: str) -> tuple[str, Any, Any]:
    """Set up a workload with PyTorch on a real GPU. Returns the GPU's name and the functions `step` and `finish`."""
    import torch

    torch.manual_seed(0)
    name = torch.cuda.get_device_name(0)
    if kind == "busy":
        return name, *_torch_products(torch)
    if kind == "launch":
        x = torch.zeros(64, 64, device="cuda")

        def launches() -> Done:
            for _ in range(500):
                x.add_(1.0)
            torch.cuda.synchronize()
            return 1, 0

        return name, launches, _nothing
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

        def replay() -> Done:
            graph.replay()
            torch.cuda.synchronize()
            return 1, 0

        return name, replay, _nothing
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01)
    images = torch.randn(64, 3, 64, 64).pin_memory()
    labels = torch.randint(0, 10, (64,), device="cuda")

    def train() -> Done:
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(net(images.cuda(non_blocking=True)), labels)
        loss.backward()
        optimiser.step()
        loss.item()
        return 1, 0

    return name, train, _nothing


def orders() -> Iterator[tuple[float, bool]]:
    """Read commands from standard input; yield the length of a block in seconds, and whether to time its steps."""
    for line in sys.stdin:
        words = line.split()
        if len(words) == 2 and words[0] in ("run", "steps"):
            yield float(words[1]), words[0] == "steps"


def keep_to(core: int) -> None:
    """Pin the threads that launch to one core: the calling thread, and PyTorch's thread for the backward pass."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread may have ended since it was listed
            if int(task.name) == threading.get_native_id() or (task / "comm").read_text().startswith("pt_autograd"):
                os.sched_setaffinity(int(task.name), {core})


def main(arguments: list[str]) -> int:
    """Set up the workload, print `ready`, then run the blocks that standard input asks for. Arguments: KIND, backend
    (driver, torch), length of a kernel in ns."""
    given = dict(enumerate(arguments))
    kind, backend, kernel_ns = given.get(0, "busy"), given.get(1, "driver"), int(given.get(2, "1600000"))
    if kind not in KINDS:
        print(f"unknown workload {kind!r}; known: {', '.join(KINDS)}", file=sys.stderr)
        return 2
    if backend == "torch":
        name, step, finish = torch_workload(kind)
    else:
        name, step, finish = driver_workload(kind, kernel_ns)
    # this first block is not measured: modules are loaded lazily, and the first turn takes time to begin
    run_block(step, finish, 0.05)
    if core := os.environ.get(LAUNCH_CORE):
        keep_to(int(core))
    print(f"ready {name}", flush=True)
    for seconds, timed in orders():
        steps_ns: list[int] = []
        block = run_block(step, finish, seconds, steps_ns if timed else None)
        if sys.stdout.isatty():  # on a terminal, hundreds of marks would hide the other results
            del block["marks"]
        print(json.dumps(block | ({"steps_ns": steps_ns} if timed else {})), flush=True)
    return 0


def in_a_sentence(program: Callable[[list[str]], int]) -> int:
    """Run a benchmark's program; print an error as one sentence. Returns the exit status: 2 for wrong input, 1 for
    failed work, 130 after Ctrl-C."""
    if "--help" in sys.argv[1:]:
        print(sys.modules["__main__"].__doc__)
        return 0
    try:
        return program(sys.argv[1:])
    except (InputError, WorkError, ModuleNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(in_a_sentence(main))
