"""A program that copies between host and GPU: `python -m cotenant.bench.copying DIRECTION MEMORY MODE BYTES [MS]`.

DIRECTION is h2d or d2h, MEMORY pinned or pageable. MODE is sync, or async: three copies are queued on a stream, and the
program waits for the oldest. With MS a copy begins about every MS milliseconds and its latency is recorded; without MS,
copies follow one another.

Protocol as in bench/workload.py: the program prints `ready NAME`, then for each line `run SECONDS` one JSON object with
"count" (bytes copied), "begin_ns", "end_ns" and "marks". With MS the object also has "latencies_us", and "marks" is
empty. Without MS each mark is [time in ns, bytes copied until then, 0]: the 0 is in place of the GPU time that
bench/workload.py reports.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from cotenant.bench.driver import Driver
from cotenant.bench.workload import orders, pipelined, run_block
from cotenant.core.errors import WorkError

DIRECTIONS = ("h2d", "d2h")
DEPTH = 3
FUNCTIONS = {"h2d": "cuMemcpyHtoD", "d2h": "cuMemcpyDtoH"}


class Copier:
    """Copies `size` bytes between a host buffer and a device buffer."""

    def __init__(self, cuda: Driver, direction: str, memory: str, size: int) -> None:
        self.cuda, self.size = cuda, size
        device = ctypes.c_void_p()
        cuda.call("cuMemAlloc_v2", ctypes.byref(device), ctypes.c_size_t(size))
        self.host = host_memory(cuda, memory, size)
        self.device = device
        self.stream = cuda.stream()
        self.name = FUNCTIONS[direction]
        self.ends = (device, self.host) if direction == "h2d" else (self.host, device)
        events = [cuda.event() for _ in range(DEPTH)]

        def start(index: int) -> None:
            cuda.call(f"{self.name}Async_v2", *self.ends, ctypes.c_size_t(size), self.stream)
            cuda.record(events[index], self.stream)

        def wait(index: int) -> int:
            cuda.wait(events[index])
            return 0

        # functions that queue a copy and wait for all queued copies, and return the bytes of the copies that ended
        self.queue, self.finish = pipelined(start, wait, DEPTH, size)

    def whole(self) -> tuple[int, int]:
        """Run one synchronous copy. Returns the number of bytes, and 0 in place of a GPU time."""
        self.cuda.call(f"{self.name}_v2", *self.ends, ctypes.c_size_t(self.size))
        return self.size, 0


def host_memory(cuda: Driver, memory: str, size: int) -> ctypes.c_void_p:
    """Allocate host memory, pinned or pageable. Its pages are touched, so that the first copy has no page faults."""
    if memory == "pinned":
        pinned = ctypes.c_void_p()
        cuda.call("cuMemHostAlloc", ctypes.byref(pinned), ctypes.c_size_t(size), 1)
        ctypes.memset(pinned, 1, size)
        return pinned
    buffer = ctypes.create_string_buffer(size)
    ctypes.memset(buffer, 1, size)
    held.append(buffer)
    return ctypes.cast(buffer, ctypes.c_void_p)


held: list[Any] = []  # this list keeps the buffers of pageable memory alive, since only their addresses are used below


def now_and_then(copy: Callable[[], tuple[int, int]], period_s: float, seconds: float) -> dict[str, Any]:
    """Copy about every `period_s` for `seconds`; record the latency of each copy in microseconds."""
    latencies: list[float] = []
    moved = 0
    begin_ns = time.monotonic_ns()
    number = 0
    while time.monotonic_ns() - begin_ns < seconds * 1e9:
        # the times between copies are varied, so that copies do not coincide with periodic work of other processes
        due_ns = begin_ns + (number + (number * 0.618) % 1.0 * 0.5) * period_s * 1e9
        number += 1
        pause_s = (due_ns - time.monotonic_ns()) / 1e9
        if pause_s > 0:
            time.sleep(pause_s)
        started = time.perf_counter_ns()
        moved += copy()[0]
        latencies.append((time.perf_counter_ns() - started) / 1e3)
    end_ns = time.monotonic_ns()
    return {"count": moved, "begin_ns": begin_ns, "end_ns": end_ns, "marks": [], "latencies_us": latencies}


def main(arguments: list[str]) -> int:
    """Set up the buffers for copies, print `ready`, then run the blocks that standard input asks for."""
    direction, memory, mode, size = arguments[0], arguments[1], arguments[2], int(arguments[3])
    period_ms = float(arguments[4]) if len(arguments) > 4 else 0.0
    try:
        cuda = Driver()
        copier = Copier(cuda, direction, memory, size)
        step = copier.whole if mode == "sync" else copier.queue
        for _ in range(4):
            step()
        copier.finish()
    except WorkError as error:
        # the parent process reads this line instead of `ready`
        print(f"{size} bytes {direction}, {memory}: {error}", flush=True)
        return 1
    print(f"ready {cuda.name}", flush=True)
    for seconds, _ in orders():
        block = now_and_then(step, period_ms / 1e3, seconds) if period_ms else run_block(step, copier.finish, seconds)
        print(json.dumps(block), flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:  # the benchmark that started this program has ended
        os._exit(1)
