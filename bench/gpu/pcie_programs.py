"""Programs of bench/gpu/pcie.py, on the driver API: contents, order and cost of copies."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

from cotenant.bench.driver import Driver

# not a multiple of any chunk size, so that the last chunk is incomplete
SIZE = int(os.environ.get("COTENANT_CHECK_BYTES", (40 << 20) + 12345))


def driver() -> Driver:
    return Driver()


class Memory:
    def __init__(self, cuda: Driver, size: int) -> None:
        self.cuda, self.size = cuda, size
        self.device, self.pinned = ctypes.c_void_p(), ctypes.c_void_p()
        cuda.call("cuMemAlloc_v2", ctypes.byref(self.device), ctypes.c_size_t(size))
        cuda.call("cuMemHostAlloc", ctypes.byref(self.pinned), ctypes.c_size_t(size), 1)
        self.pageable = ctypes.create_string_buffer(size)

    def fill(self, where: Any, seed: int) -> bytes:
        pattern = bytes((seed * 31 + i * 7 + (i >> 8)) & 255 for i in range(4099))
        text = (pattern * (self.size // len(pattern) + 1))[: self.size]
        ctypes.memmove(where, text, self.size)
        return text

    def read(self, where: Any) -> bytes:
        return ctypes.string_at(where, self.size)


def there_and_back(cuda: Driver, memory: Memory, host: Any, how: str) -> bool:
    """Whether a copy to the device and back into zeroed memory returns the same contents."""
    size = ctypes.c_size_t(memory.size)
    text = memory.fill(host, len(how))
    stream = cuda.stream()
    cuda.call("cuMemsetD8_v2", memory.device, 0, size)
    if how == "sync":
        cuda.call("cuMemcpyHtoD_v2", memory.device, host, size)
        ctypes.memset(host, 0, memory.size)
        cuda.call("cuMemcpyDtoH_v2", host, memory.device, size)
    elif how == "any":
        cuda.call("cuMemcpy", memory.device, host, size)
        ctypes.memset(host, 0, memory.size)
        cuda.call("cuMemcpy", host, memory.device, size)
    else:
        cuda.call("cuMemcpyHtoDAsync_v2", memory.device, host, size, stream)
        cuda.call("cuStreamSynchronize", stream)
        ctypes.memset(host, 0, memory.size)
        cuda.call("cuMemcpyDtoHAsync_v2", host, memory.device, size, stream)
        cuda.call("cuStreamSynchronize", stream)
    return memory.read(host) == text


class Copy2D(ctypes.Structure):
    _fields_ = [
        (name, kind)
        for side in ("from", "to")
        for name, kind in (
            (f"{side}_x", ctypes.c_size_t),
            (f"{side}_y", ctypes.c_size_t),
            (f"{side}_type", ctypes.c_int),
            (f"{side}_host", ctypes.c_void_p),
            (f"{side}_device", ctypes.c_uint64),
            (f"{side}_array", ctypes.c_void_p),
            (f"{side}_pitch", ctypes.c_size_t),
        )
    ] + [("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]


UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the driver finds out from the address what kind of memory it is


def rows(cuda: Driver, memory: Memory) -> bool:
    """Copy a window of rows to the device with another pitch, and back: memory between the rows must not change."""
    from_pitch, to_pitch, width = 4096, 3584, 3000
    height = memory.size // from_pitch - 2
    text = memory.fill(memory.pinned, 5)
    there = Copy2D(
        0,
        1,
        UNIFIED,
        0,
        memory.pinned.value,
        0,
        from_pitch,
        0,
        0,
        2,
        0,
        memory.device.value,
        0,
        to_pitch,
        width,
        height,
    )
    stream = cuda.stream()
    cuda.call("cuMemcpy2DAsync_v2", ctypes.byref(there), stream)
    cuda.call("cuStreamSynchronize", stream)
    ctypes.memset(memory.pinned, 0, memory.size)
    back = Copy2D(
        0, 0, 2, 0, memory.device.value, 0, to_pitch, 0, 1, 1, memory.pinned.value, 0, 0, from_pitch, width, height
    )
    cuda.call("cuMemcpy2D_v2", ctypes.byref(back))
    got = memory.read(memory.pinned)
    return all(
        got[y * from_pitch : y * from_pitch + width] == text[y * from_pitch : y * from_pitch + width]
        and not any(got[y * from_pitch + width : (y + 1) * from_pitch])
        for y in range(1, height + 1, 97)
    )


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes: order of source access, location hints of both ends, flags."""

    _fields_ = [(name, ctypes.c_int) for name in ("order", "from_type", "from_id", "to_type", "to_id", "flags")]


IN_STREAM_ORDER = 1


def batches(cuda: Driver, memory: Memory, host: Any) -> dict[str, Any]:
    """Copy ranges of many lengths in one call, there and back; memory between them must not change."""
    stream = cuda.stream()
    sizes = [4096, 1 << 20, 70_001, (3 << 20) + 7, 1, 2 << 20]
    sizes = [size for size in sizes for _ in range(2 if memory.size < 32 << 20 else 1)][:7]
    offsets, at = [], 512
    for size in sizes:
        if at + size + 512 > memory.size:
            break
        offsets.append(at)
        at += size + 512
    sizes = sizes[: len(offsets)]
    count = len(sizes)
    address = ctypes.cast(host, ctypes.c_void_p).value
    assert address is not None
    assert memory.device.value is not None
    words, lengths = ctypes.c_uint64 * count, (ctypes.c_size_t * count)(*sizes)
    ends = words(*(memory.device.value + o for o in offsets)), words(*(address + o for o in offsets))
    attributes, first = Attributes(order=IN_STREAM_ORDER), ctypes.c_size_t(0)
    one, failed = ctypes.c_size_t(1), ctypes.c_size_t(0)
    found: dict[str, Any] = {}
    for name, more in (("cuMemcpyBatchAsync", [ctypes.byref(failed)]), ("cuMemcpyBatchAsync_v2", [])):
        if not hasattr(cuda._cuda, name):
            continue
        text = memory.fill(host, len(name))
        cuda.call("cuMemsetD8_v2", memory.device, 0, ctypes.c_size_t(memory.size))
        cuda.synchronise()
        rest = (lengths, ctypes.c_size_t(count), ctypes.byref(attributes), ctypes.byref(first), one, *more, stream)
        cuda.call(name, *ends, *rest)
        cuda.call("cuStreamSynchronize", stream)
        ctypes.memset(host, 0, memory.size)
        cuda.call(name, *ends[::-1], *rest)
        cuda.call("cuStreamSynchronize", stream)
        got, wanted = memory.read(host), bytearray(memory.size)
        for offset, size in zip(offsets, sizes, strict=True):
            wanted[offset : offset + size] = text[offset : offset + size]
        found[name] = got == bytes(wanted)
    return found


def in_order(cuda: Driver, memory: Memory) -> dict[str, bool]:
    """Whether a copy waits for the kernel before it, later work waits for the copy, and the call returns at once."""
    stream, size = cuda.stream(), ctypes.c_size_t(memory.size)
    text = memory.fill(memory.pinned, 3)
    other = ctypes.c_void_p()
    cuda.call("cuMemAlloc_v2", ctypes.byref(other), size)
    # a longer kernel is tried if the machine was so busy that the first one ended between the two calls
    for kernel_s in (0.1, 1.0, 10.0):
        began = time.perf_counter()
        cuda.launch(int(kernel_s * 1e9), stream)
        cuda.call("cuMemcpyHtoDAsync_v2", memory.device, memory.pinned, size, stream)
        cuda.call("cuMemcpyDtoDAsync_v2", other, memory.device, size, stream)
        queued_s = time.perf_counter() - began
        event = cuda.event()
        cuda.record(event, stream)
        early = cuda._cuda.cuEventQuery(event) == 600
        cuda.wait(event)
        took_s = time.perf_counter() - began
        if early:
            break
    ctypes.memset(memory.pinned, 0, memory.size)
    cuda.call("cuMemcpyDtoH_v2", memory.pinned, other, size)
    cuda.call("cuMemFree_v2", other)
    return {
        "content": memory.read(memory.pinned) == text,
        "call_returned_before_the_kernel": queued_s < kernel_s,
        "not_done_early": early,
        "waited_for_the_kernel": took_s > kernel_s,
    }


def default_stream(cuda: Driver, memory: Memory) -> bool:
    """Whether copies and kernels of the NULL stream keep their order, and a synchronous copy waits for the kernel
    before it."""
    size = ctypes.c_size_t(memory.size)
    began = time.perf_counter()
    cuda.launch(50_000_000)
    cuda.call("cuMemcpyHtoD_v2", memory.device, memory.pinned, size)
    return time.perf_counter() - began > 0.05


def graphs(cuda: Driver, memory: Memory) -> dict[str, bool]:
    """Whether a captured copy is a node of the graph, and copies the contents at the time of the launch."""
    stream, size = cuda.stream(), ctypes.c_size_t(memory.size)
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    cuda.call("cuStreamBeginCapture_v2", stream, 0)
    cuda.call("cuMemcpyHtoDAsync_v2", memory.device, memory.pinned, size, stream)
    cuda.call("cuStreamEndCapture", stream, ctypes.byref(graph))
    nodes = ctypes.c_size_t(0)
    cuda.call("cuGraphGetNodes", graph, None, ctypes.byref(nodes))
    cuda.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
    text = memory.fill(memory.pinned, 9)
    cuda.call("cuGraphLaunch", executable, stream)
    cuda.call("cuStreamSynchronize", stream)
    ctypes.memset(memory.pinned, 0, memory.size)
    cuda.call("cuMemcpyDtoH_v2", memory.pinned, memory.device, size)
    return {"one_node": nodes.value == 1, "content": memory.read(memory.pinned) == text}


def many_streams(cuda: Driver) -> bool:
    """Whether sixty-four streams can copy different contents at the same time."""
    size = 3 << 20 if SIZE > 32 << 20 else 3 << 17
    parts = [(Memory(cuda, size), cuda.stream()) for _ in range(64)]
    texts = [memory.fill(memory.pinned, n) for n, (memory, _) in enumerate(parts)]
    for memory, stream in parts:
        cuda.call("cuMemcpyHtoDAsync_v2", memory.device, memory.pinned, ctypes.c_size_t(size), stream)
    for memory, stream in parts:
        cuda.call("cuStreamSynchronize", stream)
        ctypes.memset(memory.pinned, 0, size)
        cuda.call("cuMemcpyDtoHAsync_v2", memory.pinned, memory.device, ctypes.c_size_t(size), stream)
    cuda.synchronise()
    return all(memory.read(memory.pinned) == text for (memory, _), text in zip(parts, texts, strict=True))


def checks() -> dict[str, Any]:
    cuda = driver()
    memory = Memory(cuda, SIZE)
    found: dict[str, Any] = {}
    for how in ("sync", "async", "any"):
        for name, host in (("pinned", memory.pinned), ("pageable", memory.pageable)):
            found[f"{how} {name}"] = there_and_back(cuda, memory, host, how)
    for name, check in (("in_order", in_order), ("default_stream", default_stream), ("graphs", graphs), ("rows", rows)):
        try:
            found[name] = check(cuda, memory)
        except Exception as error:
            found[name] = repr(error)
    for name, host in (("pinned", memory.pinned), ("pageable", memory.pageable)):
        try:
            found[f"batches {name}"] = batches(cuda, memory, host)
        except Exception as error:
            found[f"batches {name}"] = repr(error)
    found["many_streams"] = many_streams(cuda)
    return found


def cost() -> dict[str, Any]:
    """Microseconds of a synchronous copy (median of many) and GB/s of queued ones, by size."""
    cuda = driver()
    memory = Memory(cuda, 64 << 20)
    stream = cuda.stream()
    found: dict[str, Any] = {}
    for size in (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20):
        length = ctypes.c_size_t(size)
        for name, function, ends in (
            ("h2d", "cuMemcpyHtoD", (memory.device, memory.pinned)),
            ("d2h", "cuMemcpyDtoH", (memory.pinned, memory.device)),
        ):
            taken = []
            for _ in range(60 if size < 16 << 20 else 15):
                began = time.perf_counter_ns()
                cuda.call(f"{function}_v2", *ends, length)
                taken.append((time.perf_counter_ns() - began) / 1e3)
            taken.sort()
            count = max(4, min(400, (256 << 20) // size))
            cuda.call("cuStreamSynchronize", stream)
            first = time.perf_counter()
            for _ in range(count):
                cuda.call(f"{function}Async_v2", *ends, length, stream)
            queued = time.perf_counter()
            cuda.call("cuStreamSynchronize", stream)
            ended = time.perf_counter()
            found[f"{name} {size >> 10} KiB"] = {
                "sync_us": taken[len(taken) // 2],
                "queue_us": (queued - first) / count * 1e6,
                "queued_gb_per_s": count * size / (ended - first) / 1e9,
            }
    return found
