"""The program whose memory `bench swap` moves: `python -m cotenant.bench.swap_worker torch|driver BYTES SEED`.

Prints `ready NAME`, then answers each line of standard input with one JSON object. `fill SEED` writes contents that
depend on seed and position; `check` compares the contents with the last ones written. `copy BYTES` measures pinned
copies. `steady out|in BYTES START_NS SECONDS` measures copies of one direction from START_NS on, so that two processes
can copy at the same time. `end` ends the program.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

CHUNK = 256 << 20
REPEATS = 5


class TorchMemory:
    """One tensor of `size` bytes. Contents and checksums are computed on the GPU."""

    def __init__(self, size: int) -> None:
        import torch

        self.torch = torch
        self.words = torch.empty(size // 8, dtype=torch.int64, device="cuda")
        step = min(CHUNK // 8, len(self.words))
        self.weights = torch.arange(step, dtype=torch.int64, device="cuda") * 2 + 1
        torch.cuda.synchronize()
        self.name = torch.cuda.get_device_name()
        self.sum = 0

    def fill(self, seed: int) -> None:
        """Fill the memory with test contents: word i is (i + seed) * odd constant, with mixed bits, so words differ
        between positions and between seeds.
        """
        step = len(self.weights)
        for index, part in enumerate(self.words.split(step)):
            part.copy_(self.weights[: len(part)])
            part.add_(2 * (index * step + seed * 1_000_003)).mul_(-7046029254386353131)
            part.bitwise_xor_(part >> 29)
        self.sum = self._sum()

    def _sum(self) -> int:
        total = 0
        for index, part in enumerate(self.words.split(len(self.weights))):
            total = (total + (index + 1) * int((part * self.weights[: len(part)]).sum())) % (1 << 64)
        return total

    def check(self) -> bool:
        """Whether the contents are the last ones written. The checksum depends on positions, so it also shows whether
        parts of the contents were exchanged.
        """
        return self._sum() == self.sum

    def copy(self, size: int) -> dict[str, float]:
        """Return the median bytes per second of pinned copies: "out" (from the GPU to the host), "in" (to the GPU), and
        "both", the rate in each direction while copies of both directions run.
        """
        torch = self.torch
        device = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
        host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        streams = [torch.cuda.Stream() for _ in range(2)]

        def out() -> None:
            with torch.cuda.stream(streams[0]):
                host[0].copy_(device[0], non_blocking=True)

        def back() -> None:
            with torch.cuda.stream(streams[1]):
                device[1].copy_(host[1], non_blocking=True)

        return _rates(size, out, back, torch.cuda.synchronize)

    def steady(self, way: str, size: int) -> tuple[Callable[[int], None], Callable[[int], None]]:
        """Return functions that start copy i of `size` bytes in one direction and wait for it. Two may be in flight."""
        torch = self.torch
        stream = torch.cuda.Stream()
        device = torch.empty(size, dtype=torch.uint8, device="cuda")
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        events = [torch.cuda.Event() for _ in range(2)]

        def start(index: int) -> None:
            with torch.cuda.stream(stream):
                (host if way == "out" else device).copy_(device if way == "out" else host, non_blocking=True)
                events[index % 2].record()

        return start, lambda index: events[index % 2].synchronize()


class DriverMemory:
    """Blocks of GPU memory, allocated through the driver API, for the software GPU. Contents are made and checked on
    the host.
    """

    BLOCK = 32 << 20

    def __init__(self, size: int) -> None:
        from cotenant.bench.driver import Driver

        self.cuda = Driver()
        self.name = self.cuda.name
        self.blocks: list[tuple[ctypes.c_void_p, int]] = []
        self.sums: list[bytes] = []
        for at in range(0, size, self.BLOCK):
            length = min(self.BLOCK, size - at)
            pointer = ctypes.c_void_p()
            self.cuda.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(length))
            self.blocks.append((pointer, length))

    def fill(self, seed: int) -> None:
        """Fill the blocks of memory with random bytes of that seed."""
        self.sums = []
        for index, (pointer, length) in enumerate(self.blocks):
            data = random.Random(f"{seed}-{index}").randbytes(length)
            self.cuda.call("cuMemcpyHtoD_v2", pointer, data, ctypes.c_size_t(length))
            self.sums.append(hashlib.blake2b(data).digest())

    def check(self) -> bool:
        """Whether every block of memory has the contents last written."""
        for (pointer, length), wanted in zip(self.blocks, self.sums, strict=True):
            data = ctypes.create_string_buffer(length)
            self.cuda.call("cuMemcpyDtoH_v2", data, pointer, ctypes.c_size_t(length))
            if hashlib.blake2b(memoryview(data)[:length]).digest() != wanted:
                return False
        return True

    def copy(self, size: int) -> dict[str, float]:
        """Measure the rates of pinned copies; see `TorchMemory.copy`."""
        device = [ctypes.c_void_p() for _ in range(2)]
        host = [ctypes.c_void_p() for _ in range(2)]
        for way in range(2):
            self.cuda.call("cuMemAlloc_v2", ctypes.byref(device[way]), ctypes.c_size_t(size))
            self.cuda.call("cuMemHostAlloc", ctypes.byref(host[way]), ctypes.c_size_t(size), 0)
        streams = [self.cuda.stream() for _ in range(2)]

        def out() -> None:
            self.cuda.call("cuMemcpyDtoHAsync_v2", host[0], device[0], ctypes.c_size_t(size), streams[0])

        def back() -> None:
            self.cuda.call("cuMemcpyHtoDAsync_v2", device[1], host[1], ctypes.c_size_t(size), streams[1])

        return _rates(size, out, back, self.cuda.synchronise)

    def steady(self, way: str, size: int) -> tuple[Callable[[int], None], Callable[[int], None]]:
        """Return functions that start and wait for copies of one direction; see `TorchMemory.steady`."""
        device, host, length = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t(size)
        self.cuda.call("cuMemAlloc_v2", ctypes.byref(device), length)
        self.cuda.call("cuMemHostAlloc", ctypes.byref(host), length, 0)
        stream = self.cuda.stream()
        events = [self.cuda.event() for _ in range(2)]

        def start(index: int) -> None:
            if way == "out":
                self.cuda.call("cuMemcpyDtoHAsync_v2", host, device, length, stream)
            else:
                self.cuda.call("cuMemcpyHtoDAsync_v2", device, host, length, stream)
            self.cuda.record(events[index % 2], stream)

        return start, lambda index: self.cuda.wait(events[index % 2])


def steady_rate(
    start: Callable[[int], None], wait: Callable[[int], None], size: int, start_ns: int, seconds: float
) -> float:
    """Return the bytes per second with two copies in flight, counted over copies that end in the last three quarters of
    the time.
    """
    while (pause_ns := start_ns - time.monotonic_ns()) > 0:
        time.sleep(min(pause_ns / 1e9, 0.001))
    from_ns, until_ns = start_ns + round(seconds * 0.25e9), start_ns + round(seconds * 1e9)
    ends: list[int] = []
    start(0)
    while True:
        start(len(ends) + 1)
        wait(len(ends))
        ends.append(time.monotonic_ns())
        if ends[-1] >= until_ns and len(ends) > 2:
            break
    wait(len(ends))
    counted = [end for end in ends if from_ns <= end <= until_ns]
    if len(counted) < 2:
        counted = ends
    return (len(counted) - 1) * size / ((counted[-1] - counted[0]) / 1e9)


def _rates(size: int, out: Callable[[], None], back: Callable[[], None], wait: Callable[[], None]) -> dict[str, float]:
    def rate(*starts: Callable[[], None]) -> float:
        taken = []
        for _ in range(REPEATS + 1):
            wait()
            began = time.perf_counter()
            for start in starts:
                start()
            wait()
            taken.append(time.perf_counter() - began)
        return size / statistics.median(taken[1:])

    return {"out": rate(out), "in": rate(back), "both": rate(out, back)}


def main() -> int:
    """Set up the memory, print `ready`, then execute the lines of standard input."""
    backend, size = sys.argv[1], int(sys.argv[2])
    memory: Any = TorchMemory(size) if backend == "torch" else DriverMemory(size)
    memory.fill(int(sys.argv[3]))
    steady: dict[tuple[str, int], tuple[Callable[[int], None], Callable[[int], None]]] = {}
    print(f"ready {memory.name}", flush=True)
    for line in sys.stdin:
        order, *rest = line.split()
        answer: dict[str, Any] = {}
        if order == "fill":
            memory.fill(int(rest[0]))
        elif order == "check":
            answer["intact"] = memory.check()
        elif order == "copy":
            answer = memory.copy(int(rest[0]))
        elif order == "steady":
            key = (rest[0], int(rest[1]))
            if key not in steady:
                steady[key] = memory.steady(*key)
            answer["rate"] = steady_rate(*steady[key], key[1], int(rest[2]), float(rest[3]))
        elif order == "end":
            break
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
