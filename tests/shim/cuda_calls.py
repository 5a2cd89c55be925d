"""The driver API by ctypes, for test programs: `cu("cuMemAlloc_v2", pointer, size)` raises on an error code."""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

library = ctypes.CDLL(os.environ.get("CLIENT_LIBRARY", "libcuda.so.1"))
IMAGE = b"cotenant-soft-module\nbusy 100000\nlong 2000000\ntimed param\n"


class CudaError(Exception):
    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name}: {code}")
        self.code = code


def raw(name: str, *arguments: Any) -> int:
    return int(getattr(library, name)(*arguments))


def cu(name: str, *arguments: Any) -> None:
    code = raw(name, *arguments)
    if code:
        raise CudaError(name, code)


def start() -> c_void_p:
    """Initialises, makes the primary context current and loads the module."""
    cu("cuInit", 0)
    context, module = c_void_p(), c_void_p()
    cu("cuDevicePrimaryCtxRetain", byref(context), 0)
    cu("cuCtxSetCurrent", context)
    cu("cuModuleLoadData", byref(module), IMAGE)
    return module


def function(module: c_void_p, name: bytes) -> c_void_p:
    found = c_void_p()
    cu("cuModuleGetFunction", byref(found), module, name)
    return found


def launch(kernel: c_void_p, stream: c_void_p | None = None) -> None:
    cu("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream, None, None)


def mem_info() -> tuple[int, int]:
    free, total = c_size_t(), c_size_t()
    cu("cuMemGetInfo_v2", byref(free), byref(total))
    return free.value, total.value


__all__ = [
    "CudaError",
    "byref",
    "c_int",
    "c_size_t",
    "c_uint64",
    "c_void_p",
    "cu",
    "function",
    "launch",
    "library",
    "mem_info",
    "raw",
    "start",
]
