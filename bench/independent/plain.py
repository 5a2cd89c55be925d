"""Ordinary GPU programs without any knowledge of Cotenant. They use PyTorch on a real GPU, and the driver API on the
software GPU.

    python plain.py work SECONDS          multiply 8192 x 8192 matrices (kernels of 1.6 ms); reports counts over time
    python plain.py serve RATE SECONDS    serve requests of 1 ms with Poisson arrivals; reports ms from the arrival
    python plain.py hold BYTES            fill memory with a pattern; answers each line of input: intact or changed
    python plain.py round BYTES SECONDS   work on that memory, block by block; reports progress, and if it is intact
    python plain.py copy SECONDS          copy 64 MiB from pinned memory, several queued; reports counts over time

Each program prints one JSON line at its end (`hold`: one per line of input). --soft after the arguments selects the
driver API.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
import time
from collections.abc import Callable

SOFT = "--soft" in sys.argv
COPY_BYTES = 64 << 20


class Driver:
    """The calls of libcuda that the programs need. Its kernels exist only on the software GPU: they take a given
    time."""

    def __init__(self, kernel_ns: int) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        device, context, module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self.function, self.stream = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuModuleLoadData", ctypes.byref(module), f"cotenant-soft-module\nwork {kernel_ns}\n\0".encode())
        self.call("cuModuleGetFunction", ctypes.byref(self.function), module, b"work")
        self.call("cuStreamCreate", ctypes.byref(self.stream), 1)

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self.cuda, name)(*arguments)
        if code:
            raise SystemExit(f"{name}: error {code}")

    def allocate(self, size: int) -> ctypes.c_uint64:
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer

    def launch(self) -> None:
        self.call("cuLaunchKernel", self.function, 1, 1, 1, 1, 1, 1, 0, self.stream, None, None)

    def wait(self) -> None:
        self.call("cuStreamSynchronize", self.stream)


def unit(kernel_ns: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Returns a function that queues work of about that length, and one that waits for all work."""
    if SOFT:
        driver = Driver(kernel_ns)
        return driver.launch, driver.wait
    import torch

    size = 8192 if kernel_ns > 1_200_000 else 6144
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    out = torch.empty_like(a)

    def queue() -> None:
        torch.mm(a, b, out=out)

    return queue, torch.cuda.synchronize


def work(seconds: float) -> object:
    launch, wait = unit(1_600_000)
    launch()
    wait()
    begin, done, marks = time.monotonic(), 0, [(time.monotonic(), 0)]
    while time.monotonic() < begin + seconds:
        for _ in range(4):
            launch()
        wait()
        done += 4
        marks.append((time.monotonic(), done))
    return marks


def serve(rate: float, seconds: float) -> object:
    launch, wait = unit(1_000_000)
    launch()
    wait()
    chance, latencies = random.Random(1), []
    due = begin = time.monotonic()
    while (due := due + chance.expovariate(rate)) < begin + seconds:
        time.sleep(max(0.0, due - time.monotonic()))
        launch()
        wait()
        latencies.append((time.monotonic() - due) * 1e3)
    return sorted(latencies)


def hold(size: int) -> object:
    if SOFT:
        driver = Driver(100_000)
        pattern = bytes(random.Random(2).randrange(256) for _ in range(1 << 16)) * (size >> 16)
        there, back = driver.allocate(size), ctypes.create_string_buffer(size)
        driver.call("cuMemcpyHtoD_v2", there, pattern, ctypes.c_size_t(size))

        def intact() -> bool:
            driver.launch()
            driver.call("cuMemcpyDtoH_v2", back, there, ctypes.c_size_t(size))
            return back.raw == pattern

    else:
        import torch

        data = torch.randint(0, 1 << 30, (size // 8,), device="cuda")
        total = int(data.sum())

        def intact() -> bool:
            return int(data.sum()) == total

    print("there", flush=True)
    for _ in sys.stdin:
        print("intact" if intact() else "changed", flush=True)
    return None


def visit(size: int, seconds: float) -> object:
    """Multiply each block of the memory in turn; the contents of all blocks are checked at the end."""
    if SOFT:
        driver, each = Driver(1_600_000), 8 << 20
        blocks = [driver.allocate(each) for _ in range(size // each)]
        pattern, back = random.Random(3).randbytes(1 << 16), ctypes.create_string_buffer(1 << 16)
        for n, block in enumerate(blocks):
            driver.call("cuMemcpyHtoD_v2", block, pattern[n:] + pattern[:n], ctypes.c_size_t(len(pattern)))
        wait: Callable[[], None] = driver.wait

        def launch(n: int) -> None:
            driver.launch()

        def whole(n: int) -> bool:
            driver.call("cuMemcpyDtoH_v2", back, blocks[n], ctypes.c_size_t(len(pattern)))
            return back.raw == pattern[n:] + pattern[:n]

    else:
        import torch

        side, wait = 8192, torch.cuda.synchronize  # a block has 128 MiB
        count = size // (2 * side * side)
        blocks = [torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        out, sums = torch.empty_like(blocks[0]), [int(b.view(torch.int32).sum()) for b in blocks]

        def launch(n: int) -> None:
            torch.mm(blocks[n], blocks[n - 1], out=out)

        def whole(n: int) -> bool:
            return int(blocks[n].view(torch.int32).sum()) == sums[n]

    begin, done, marks = time.monotonic(), 0, [(time.monotonic(), 0)]
    while time.monotonic() < begin + seconds:
        for _ in range(4):
            launch(done % len(blocks))
            done += 1
        wait()
        marks.append((time.monotonic(), done))
    return {"marks": marks, "whole": all(map(whole, range(len(blocks))))}


def copy(seconds: float) -> object:
    if SOFT:
        driver = Driver(100_000)
        there, here = driver.allocate(COPY_BYTES), ctypes.c_void_p()
        driver.call("cuMemAllocHost_v2", ctypes.byref(here), ctypes.c_size_t(COPY_BYTES))
        wait: Callable[[], None] = driver.wait

        def one() -> None:
            driver.call("cuMemcpyHtoDAsync_v2", there, here, ctypes.c_size_t(COPY_BYTES), driver.stream)

    else:
        import torch

        source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
        wait = torch.cuda.synchronize

        def one() -> None:
            target.copy_(source, non_blocking=True)

    begin, done, marks = time.monotonic(), 0, [(time.monotonic(), 0)]
    while time.monotonic() < begin + seconds:
        for _ in range(8):
            one()
        wait()
        done += 8
        marks.append((time.monotonic(), done))
    return marks


if __name__ == "__main__":
    given = [a for a in sys.argv[2:] if a != "--soft"]
    programs: dict[str, Callable[[], object]] = {
        "work": lambda: work(float(given[0])),
        "serve": lambda: serve(float(given[0]), float(given[1])),
        "hold": lambda: hold(int(given[0])),
        "round": lambda: visit(int(given[0]), float(given[1])),
        "copy": lambda: copy(float(given[0])),
    }
    print(json.dumps(programs[sys.argv[1]]()))
