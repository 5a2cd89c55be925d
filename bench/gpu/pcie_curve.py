"""Measures the rate of copies by chunk size, and the cost of a wait in the stream before each chunk. The default chunk
size follows from this.

All programs are native. `plain`: successive chunks on one stream. `paced`: before each chunk, the shim's two stream
memory operations in one call (write `ready`, wait for `go`). Turns are granted beforehand, so only the cost of the
operations is measured. `told`: only a write after each chunk, as if the waiting thread issued the chunks. `waited`:
only the wait. `evented`: the wait, and an event instead of a write after each chunk. `two_streams`: like `paced`, but
alternating between two streams.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

from cotenant.bench.copying import FUNCTIONS, host_memory
from cotenant.bench.driver import Driver

SIZES = tuple(64 << (10 + n) for n in range(9))  # 64 KiB .. 16 MiB
TOTAL = 512 << 20


KINDS = ("plain", "paced", "told", "waited", "evented", "two_streams")
WAIT, WRITE = 1, 2


class WordOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams of one 32-bit word."""

    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("unused_0", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("unused_1", ctypes.c_uint32),
        ("unused_2", ctypes.c_uint64 * 2),
    ]


class Curve:
    """Buffers, a stream, and two words of host memory that the GPU can access."""

    def __init__(self, cuda: Driver, total: int) -> None:
        self.cuda, self.total = cuda, total
        self.device = ctypes.c_void_p()
        cuda.call("cuMemAlloc_v2", ctypes.byref(self.device), ctypes.c_size_t(total))
        self.host = host_memory(cuda, "pinned", total)
        self.stream, self.other = cuda.stream(), cuda.stream()
        self.event = cuda.event()
        words = host_memory(cuda, "pinned", 4096)
        address = ctypes.c_uint64()
        cuda.call("cuMemHostGetDevicePointer_v2", ctypes.byref(address), words, 0)
        assert words.value is not None
        self.ready = ctypes.c_uint32.from_address(words.value)
        self.go = ctypes.c_uint32.from_address(words.value + 64)
        self.ready_at, self.go_at = ctypes.c_uint64(address.value), ctypes.c_uint64(address.value + 64)

    def words(self, kind: str, number: int, stream: ctypes.c_void_p) -> None:
        """Enqueue the operations that a kind has before (told: after) each chunk."""
        write = WordOperation(WRITE, 0, self.ready_at.value, number)
        wait = WordOperation(WAIT, 0, self.go_at.value, number)
        chosen = {"told": (write,), "waited": (wait,), "evented": (wait,)}.get(kind, (write, wait))
        self.cuda.call("cuStreamBatchMemOp_v2", stream, len(chosen), (WordOperation * len(chosen))(*chosen), 0)

    def run(self, direction: str, size: int, kind: str) -> tuple[float, float]:
        """Copy the whole buffer in chunks of `size`; returns bytes per second, and the host's microseconds per
        chunk."""
        self.go.value, self.ready.value = 0x7FFFFFFF, 0
        name = f"{FUNCTIONS[direction]}Async_v2"
        assert self.device.value is not None
        assert self.host.value is not None
        self.cuda.synchronise()
        began = time.perf_counter()
        for number, at in enumerate(range(0, self.total, size), 1):
            stream = self.other if kind == "two_streams" and number % 2 else self.stream
            if kind not in ("plain", "told"):
                self.words(kind, number, stream)
            ends = (ctypes.c_void_p(self.device.value + at), ctypes.c_void_p(self.host.value + at))
            self.cuda.call(name, *(ends if direction == "h2d" else ends[::-1]), ctypes.c_size_t(size), stream)
            if kind == "told":
                self.words(kind, number, stream)
            elif kind == "evented":
                self.cuda.record(self.event, stream)
        queued = time.perf_counter()
        self.cuda.synchronise()
        return self.total / (time.perf_counter() - began), (queued - began) / (self.total / size) * 1e6

    def reaction_us(self, rounds: int = 200) -> dict[str, float]:
        """Time from storing `go` until the next word arrives: two crossings of the link and the stream's own delay."""
        taken = []
        for _ in range(rounds):
            self.go.value = self.ready.value = 0
            self.cuda.call("cuStreamWaitValue32_v2", self.stream, self.go_at, ctypes.c_uint32(1), 0)
            self.cuda.call("cuStreamWriteValue32_v2", self.stream, self.ready_at, ctypes.c_uint32(1), 0)
            time.sleep(0.0005)
            began = time.perf_counter()
            self.go.value = 1
            while self.ready.value != 1 and time.perf_counter() - began < 1.0:
                pass
            taken.append((time.perf_counter() - began) * 1e6)
            self.cuda.call("cuStreamSynchronize", self.stream)
        taken.sort()
        return {"p50": taken[rounds // 2], "p99": taken[int(rounds * 0.99)]}


def measure(sizes: Sequence[int] = SIZES, total: int = TOTAL, repeats: int = 3) -> dict[str, Any]:
    """The curve of this process's GPU: GB/s by chunk, direction and kind (best of `repeats`)."""
    cuda = Driver()
    curve = Curve(cuda, total)
    rows = []
    for direction in FUNCTIONS:
        for size in sizes:
            row: dict[str, Any] = {"direction": direction, "chunk_bytes": size}
            for kind in KINDS:
                runs = [curve.run(direction, size, kind) for _ in range(repeats)]
                row[f"{kind}_gb_per_s"] = max(speed for speed, _ in runs) / 1e9
                row[f"{kind}_host_us_per_chunk"] = min(host for _, host in runs)
            rows.append(row)
    return {"gpu": cuda.name, "total_bytes": total, "curve": rows, "reaction_us": curve.reaction_us()}
