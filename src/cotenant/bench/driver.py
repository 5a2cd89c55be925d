"""Thin ctypes bindings of the CUDA driver API, for workloads that run on a real GPU and on the software GPU."""

from __future__ import annotations

import ctypes
import os

from cotenant.core.errors import WorkError
from cotenant.devices.nvidia import DRIVER

SOFT_IMAGE = b"""cotenant-soft-module
timed param
timed_compute param 132 compute
timed_memory param 132 memory
timed_mixed param 132 mixed
timed_service param 60 mixed
\0"""
# a kernel of one thread, which reads the GPU's timer until its time is over; the driver compiles it for the GPU of this
# machine
PTX_IMAGE = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry timed(.param .u64 length)
{
    .reg .u64 %rd<5>;
    .reg .pred %p<2>;
    ld.param.u64 %rd1, [length];
    mov.u64 %rd2, %globaltimer;
again:
    mov.u64 %rd3, %globaltimer;
    sub.u64 %rd4, %rd3, %rd2;
    setp.lt.u64 %p1, %rd4, %rd1;
    @%p1 bra again;
    ret;
}
\0"""

LIBRARY_VARIABLE = "COTENANT_BENCH_LIBRARY"

_P = ctypes.c_void_p
_U = ctypes.c_uint


def driver_library() -> str:
    """Return the CUDA driver library to load: the path in COTENANT_BENCH_LIBRARY, which the harness sets to the real
    driver for programs without the shim, or else the driver's usual name. In a tenant the loader finds the shim under
    this name.
    """
    return os.environ.get(LIBRARY_VARIABLE, DRIVER)


class Driver:
    """The CUDA driver with one context on device 0, and a kernel that runs for a given time. WorkError if a call fails.
    """

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL(driver_library())
        except OSError as error:
            raise WorkError(f"no CUDA driver: {error}") from None
        self.call("cuInit", 0)
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        name = ctypes.create_string_buffer(96)
        self.call("cuDeviceGetName", name, 96, device)
        self.name = name.value.decode()
        context, module, function = _P(), _P(), _P()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._context = context
        self.make_current()
        image = SOFT_IMAGE if "Software" in self.name else PTX_IMAGE
        self.call("cuModuleLoadData", ctypes.byref(module), image)
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"timed")
        self._functions = {"": function}
        # On the software GPU, each kernel is launched with as many blocks as SOFT_IMAGE states SMs for it, so that a
        # kernel profile shows how many SMs the kernel fills. On a real GPU, the kernel has one block.
        whole = dict.fromkeys(("", "compute", "memory", "mixed"), 132)
        self._blocks = {} if image is PTX_IMAGE else whole | {"service": 60}
        self._module = module
        self._length = ctypes.c_uint64()
        self._params = (_P * 1)(ctypes.cast(ctypes.pointer(self._length), _P))
        self._launch = self._cuda.cuLaunchKernel
        self._launch.argtypes = [_P, *[_U] * 7, _P, _P, _P]

    def make_current(self) -> None:
        """Make the context current in the calling thread."""
        self.call("cuCtxSetCurrent", self._context)

    def call(self, name: str, *arguments: object) -> None:
        """Call a driver function. WorkError with its code if it fails."""
        code = getattr(self._cuda, name)(*arguments)
        if code != 0:
            raise WorkError(f"{name} failed with code {code}")

    def _function(self, work: str) -> ctypes.c_void_p:
        """Return the kernel for a work class. A real GPU has the same kernel for all classes."""
        if work not in self._functions:
            function = _P()
            name = f"timed_{work}" if "Software" in self.name else "timed"
            self.call("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
            self._functions[work] = function
        return self._functions[work]

    def launch(self, length_ns: int, stream: ctypes.c_void_p | None = None, *, work: str = "") -> None:
        """Launch a kernel that runs for `length_ns`. `work` is its class on the software GPU: compute, memory, mixed
        or service."""
        self._length.value = length_ns
        blocks = self._blocks.get(work, 1)
        code = self._launch(self._function(work), blocks, 1, 1, 1, 1, 1, 0, stream, self._params, None)
        if code != 0:
            raise WorkError(f"cuLaunchKernel failed with code {code}")

    def synchronise(self) -> None:
        """Wait until all work of the context has ended."""
        self.call("cuCtxSynchronize")

    def event(self, *, timing: bool = False) -> ctypes.c_void_p:
        """Create a CUDA event; with `timing`, its time can be read."""
        event = _P()
        self.call("cuEventCreate", ctypes.byref(event), 0 if timing else 2)
        return event

    def elapsed_ms(self, first: ctypes.c_void_p, last: ctypes.c_void_p) -> float:
        """Return the milliseconds between two events with timing."""
        found = ctypes.c_float()
        self.call("cuEventElapsedTime", ctypes.byref(found), first, last)
        return found.value

    def record(self, event: ctypes.c_void_p, stream: ctypes.c_void_p | None = None) -> None:
        """Record a CUDA event on a stream."""
        self.call("cuEventRecord", event, stream)

    def wait(self, event: ctypes.c_void_p) -> None:
        """Wait for a recorded CUDA event."""
        self.call("cuEventSynchronize", event)

    def stream(self) -> ctypes.c_void_p:
        """Create a non-blocking CUDA stream."""
        stream = _P()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        return stream

    def graph(self, lengths_ns: list[int], stream: ctypes.c_void_p, *, work: str = "") -> ctypes.c_void_p:
        """Create an executable CUDA graph that runs kernels of the lengths `lengths_ns` one after the other."""
        graph, executable = _P(), _P()
        self.call("cuStreamBeginCapture_v2", stream, 0)
        for length_ns in lengths_ns:
            self.launch(length_ns, stream, work=work)
        self.call("cuStreamEndCapture", stream, ctypes.byref(graph))
        self.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        return executable

    def buffers(self, size: int) -> tuple[ctypes.c_void_p, ctypes.Array[ctypes.c_char]]:
        """Allocate device memory and host memory of that size."""
        return self.device_memory(size), ctypes.create_string_buffer(size)

    def device_memory(self, size: int) -> ctypes.c_void_p:
        """Allocate device memory of that size."""
        device = _P()
        self.call("cuMemAlloc_v2", ctypes.byref(device), ctypes.c_size_t(size))
        return device
