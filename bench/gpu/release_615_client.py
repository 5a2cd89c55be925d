"""A program on the driver API that executes release_615.py's orders line by line: see Client.ask there."""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from cotenant.bench import driver

MIB = 1 << 20
BLOCKS_A_SM, THREADS, KERNEL_NS = 8, 1024, 1_000_000
WRONG = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry wrong()
{
    .reg .u64 %rd<2>;
    .reg .u32 %r<2>;
    mov.u64 %rd1, 16;
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
\0"""  # the kernel writes to an address that has no memory


def client_main(library: str, device: str) -> None:
    """Run the program on the driver API."""
    cuda = ctypes.CDLL(library)
    context, module, function, sms = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    held: list[Any] = []
    image, made = driver.SOFT_IMAGE if device == "soft" else driver.PTX_IMAGE, 0

    def kernel(name: bytes, of: bytes, blocks: int, *arguments: object) -> int:
        """Run a kernel and wait for it; returns the first error code, or 0."""
        if not module:
            code = cuda.cuModuleLoadData(ctypes.byref(module), of) or cuda.cuModuleGetFunction(
                ctypes.byref(function), module, name
            )
            if code:
                return int(code)
        values = (ctypes.c_void_p * 1)(*(ctypes.cast(ctypes.pointer(each), ctypes.c_void_p) for each in arguments))
        code = cuda.cuLaunchKernel(function, blocks, 1, 1, THREADS, 1, 1, 0, None, values, None)
        return int(code or cuda.cuCtxSynchronize())

    for line in sys.stdin:
        if not context:
            made = cuda.cuInit(0) or cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0)
            cuda.cuDeviceGetAttribute(ctypes.byref(sms), 16, 0)
        word, *rest = line.split()
        if word == "take":
            held.append(ctypes.c_uint64())
            code = cuda.cuMemAlloc_v2(ctypes.byref(held[-1]), ctypes.c_size_t(int(rest[0]) * MIB))
            if code:
                held.pop()
            print(code, flush=True)
        elif word == "free":
            print(cuda.cuMemFree_v2(held.pop()) if held else 0, flush=True)
        elif word == "info":
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
            print(free.value / MIB, total.value / MIB, flush=True)
        elif word == "sms":
            cuda.cuDeviceGetAttribute(ctypes.byref(sms), 16, 0)
            print(sms.value, flush=True)
        elif word == "context":
            print(made, flush=True)
        elif word == "wrong":
            print(kernel(b"wrong", WRONG, 1), flush=True)
        else:
            length, blocks = ctypes.c_uint64(KERNEL_NS), BLOCKS_A_SM * max(1, sms.value)
            times, code, end_s = [], 0, time.perf_counter() + float(rest[0] if rest else 0)
            while not code and (len(times) < 5 or time.perf_counter() < end_s):
                began = time.perf_counter()
                code = kernel(b"timed", image, blocks, length)
                times.append(time.perf_counter() - began)
            print(*((len(times), times[0], code) if word == "count" else (min(times),)), flush=True)


if __name__ == "__main__":
    client_main(sys.argv[1], sys.argv[2])
