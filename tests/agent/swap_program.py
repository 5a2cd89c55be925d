"""A program that is told what to do line by line: takes memory, runs kernels, checks that its contents are intact."""

from __future__ import annotations

import ctypes
import hashlib
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "shim"))

from cuda_calls import CudaError, byref, c_size_t, c_uint64, c_void_p, cu, function, launch, raw, start

module = start()
kernel = function(module, b"busy")
HEAD = 1 << 16
blocks: list[tuple[c_uint64, int, bytes]] = []


word = ctypes.c_uint32(0)
captured: list[c_void_p] = []
RELAXED = 2


def hold_work(stream: c_void_p | None = None) -> int:
    """Enqueue work that goes on until `end_work`."""
    word.value = 0
    return raw("cuStreamWaitValue32_v2", stream, c_uint64(ctypes.addressof(word)), 1, 0)


def end_work() -> int:
    word.value = 1
    return 0


def begin_capture(flags: int) -> int:
    """Begin to capture a new stream into a graph."""
    stream = c_void_p()
    return raw("cuStreamCreate", byref(stream), flags) or captured.append(stream) or raw(
        "cuStreamBeginCapture_v2", stream, RELAXED
    )


def end_capture() -> int:
    graph = c_void_p()
    return raw("cuStreamEndCapture", captured.pop(), byref(graph))


def take(mib: int, each: int = 8) -> int:
    """Blocks of `each` MiB with contents of their own; the first error code, or 0."""
    for _ in range(mib // each):
        pointer = c_uint64()
        code = raw("cuMemAlloc_v2", byref(pointer), c_size_t(each << 20))
        if code:
            return code
        data = random.Random(f"{sys.argv[1]}-{len(blocks)}").randbytes(HEAD)
        for at in (0, (each << 20) - HEAD):
            cu("cuMemcpyHtoD_v2", c_uint64(pointer.value + at), data, c_size_t(HEAD))
        blocks.append((pointer, each << 20, hashlib.sha256(data).digest()))
    return 0


def on(device: int) -> int:
    """From here on, everything on another device."""
    context = c_uint64()
    return raw("cuDevicePrimaryCtxRetain", byref(context), device) or raw("cuCtxSetCurrent", context)


def managed(mib: int) -> int:
    return raw("cuMemAllocManaged", byref(c_uint64()), c_size_t(mib << 20), 1)


def give() -> int:
    """Free everything."""
    codes = [raw("cuMemFree_v2", pointer) for pointer, _, _ in blocks]
    blocks.clear()
    return max(codes, default=0)


class Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 64),)


opened = c_uint64()
opened_size = 0
first_contents = ""


def share(index: int) -> str:
    """The CUDA IPC handle of a block."""
    handle = ctypes.create_string_buffer(64)
    cu("cuIpcGetMemHandle", handle, blocks[index][0])
    return handle.raw.hex()


def open_shared(text: str, mib: int) -> str:
    """Open a handle; what is at both ends of that memory."""
    global opened_size, first_contents
    cu("cuIpcOpenMemHandle_v2", byref(opened), Handle.from_buffer_copy(bytes.fromhex(text)), 1)
    opened_size = mib << 20
    first_contents = shared_contents()
    return first_contents


def shared_contents() -> str:
    return ends(opened, opened_size)


def contents(index: int) -> str:
    return ends(*blocks[index][:2])


def ends(pointer: c_uint64, size: int) -> str:
    digest = hashlib.sha256()
    for at in (0, size - HEAD):
        data = ctypes.create_string_buffer(HEAD)
        cu("cuMemcpyDtoH_v2", data, c_uint64(pointer.value + at), c_size_t(HEAD))
        digest.update(data.raw)
    return digest.hexdigest()


def check() -> str:
    for index, (pointer, size, wanted) in enumerate(blocks):
        for at in (0, size - HEAD):
            data = ctypes.create_string_buffer(HEAD)
            cu("cuMemcpyDtoH_v2", data, c_uint64(pointer.value + at), c_size_t(HEAD))
            if hashlib.sha256(data.raw).digest() != wanted:
                return f"corrupt {index}"
    return "intact"


def work(seconds: float) -> str:
    """Kernels of 0.1 ms for that long, checking a block now and then; how many, and whether all was intact."""
    end = time.monotonic() + seconds
    done = 0
    while time.monotonic() < end:
        for _ in range(20):
            launch(kernel)
        cu("cuCtxSynchronize")
        done += 20
        if done % 400 == 0 and check() != "intact":
            return "corrupt"
    return f"{done} {check()}"


def steady(until_s: float, least_s: float) -> str:
    """Kernels until a time of the monotonic clock, checking contents now and then. JSON: whether all was intact, and
    the times in which no kernel ended for `least_s` and more, each as [begin, end].
    """
    gaps, rounds, good, last = [], 0, "intact", time.monotonic()
    while time.monotonic() < until_s and good == "intact":
        for _ in range(10):
            launch(kernel)
        cu("cuCtxSynchronize")
        rounds += 1
        if rounds % 100 == 0:
            good = check()
        now = time.monotonic()
        if now - last >= least_s:
            gaps.append([last, now])
        last = now
    return json.dumps({"contents": check() if good == "intact" else good, "gaps": gaps, "rounds": rounds})


print("ready", flush=True)
for line in sys.stdin:
    try:
        print(eval(line), flush=True)
    except CudaError as error:
        print(error, flush=True)
