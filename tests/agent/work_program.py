"""A program that does work of many kinds on the GPU, drawn from a seed, and checks all contents against a copy on the
host: copies, memsets, graphs, pools, mapped memory, callbacks, events, forks. It is told lines as swap_program.py is.
"""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "shim"))

from cuda_calls import CudaError, byref, c_size_t, c_uint64, c_void_p, cu, function, launch, start

module = start()
kernel = function(module, b"busy")
SIZE = 1 << 16
GRANULE = 2 << 20
RELAXED, PINNED, DEVICE = 2, 1, 1


class Property(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (("type", ctypes.c_int), ("handles", ctypes.c_int), ("place", ctypes.c_int), ("device", ctypes.c_int))
    _fields_ += (("rest", ctypes.c_uint64 * 3),)


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("place", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int))


class Buffer:
    """Memory of one kind, and what must be in it."""

    def __init__(self, kind: str) -> None:
        self.kind, self.pointer, self.wanted = kind, c_uint64(), bytearray(SIZE)
        if kind == "plain":
            cu("cuMemAlloc_v2", byref(self.pointer), c_size_t(GRANULE))
        elif kind == "small":
            cu("cuMemAlloc_v2", byref(self.pointer), c_size_t(SIZE))
        elif kind == "pool":
            cu("cuMemAllocAsync", byref(self.pointer), c_size_t(SIZE), None)
        else:
            handle = c_uint64()
            cu("cuMemCreate", byref(handle), c_size_t(GRANULE), byref(Property(1, 0, DEVICE, 0)), c_uint64(0))
            none = (c_size_t(0), c_uint64(0), c_uint64(0))
            cu("cuMemAddressReserve", byref(self.pointer), c_size_t(GRANULE), *none)
            cu("cuMemMap", self.pointer, c_size_t(GRANULE), c_size_t(0), handle, c_uint64(0))
            cu("cuMemSetAccess", self.pointer, c_size_t(GRANULE), byref(Access(DEVICE, 0, 3)), c_size_t(1))
            cu("cuMemRelease", handle)
        cu("cuMemsetD8_v2", self.pointer, 0, c_size_t(SIZE))

    def at(self, offset: int) -> c_uint64:
        return c_uint64(self.pointer.value + offset)

    def give(self) -> None:
        if self.kind in ("plain", "small"):
            cu("cuMemFree_v2", self.pointer)
        elif self.kind == "pool":
            cu("cuMemFreeAsync", self.pointer, None)
        else:
            cu("cuCtxSynchronize")
            cu("cuMemUnmap", self.pointer, c_size_t(GRANULE))
            cu("cuMemAddressFree", self.pointer, c_size_t(GRANULE))


KINDS = ("plain", "small", "pool", "mapped")
HOST_FUNCTION = ctypes.CFUNCTYPE(None, c_void_p)


class Work:
    """Steps drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.stream, self.event = c_void_p(), c_void_p()
        cu("cuStreamCreate", byref(self.stream), 1)
        cu("cuEventCreate", byref(self.event), 2)
        self.pinned = c_void_p()
        cu("cuMemAllocHost_v2", byref(self.pinned), c_size_t(SIZE))
        self.buffers = [Buffer(kind) for kind in KINDS]
        self.called = 0
        self.callback = HOST_FUNCTION(self._call)

    def _call(self, _: int | None) -> None:
        self.called += 1

    def part(self) -> tuple[int, int]:
        begin = self.chance.randrange(SIZE - 1)
        return begin, self.chance.randrange(1, SIZE - begin)

    def data(self, size: int) -> bytes:
        return self.chance.randbytes(1) * size if self.chance.random() < 0.5 else self.chance.randbytes(size)

    def step(self) -> None:
        steps: tuple[Callable[[Buffer], None], ...] = (
            self.fill, self.write, self.write_async, self.copy, self.copy_rows, self.graph, self.word, self.host_call,
            self.read, self.read_async, self.exchange, self.kernels,
        )  # fmt: skip
        self.chance.choice(steps)(self.chance.choice(self.buffers))

    def fill(self, to: Buffer) -> None:
        (begin, size), value = self.part(), self.chance.randrange(256)
        if self.chance.random() < 0.5:
            cu("cuMemsetD8_v2", to.at(begin), value, c_size_t(size))
        else:
            cu("cuMemsetD8Async", to.at(begin), value, c_size_t(size), self.stream)
            cu("cuStreamSynchronize", self.stream)
        to.wanted[begin : begin + size] = bytes([value]) * size

    def write(self, to: Buffer) -> None:
        begin, size = self.part()
        data = self.data(size)
        name = self.chance.choice(("cuMemcpyHtoD_v2", "cuMemcpyHtoD_v2_ptds"))
        cu(name, to.at(begin), data, c_size_t(size))
        to.wanted[begin : begin + size] = data

    def write_async(self, to: Buffer) -> None:
        begin, size = self.part()
        data = self.data(size)
        assert self.pinned.value
        ctypes.memmove(self.pinned, data, size)
        if self.chance.random() < 0.5:
            cu("cuMemcpyHtoDAsync_v2", to.at(begin), self.pinned, c_size_t(size), self.stream)
        else:
            cu("cuMemcpyAsync", to.at(begin), c_uint64(self.pinned.value), c_size_t(size), self.stream)
        cu("cuStreamSynchronize", self.stream)
        to.wanted[begin : begin + size] = data

    def copy(self, to: Buffer) -> None:
        source = self.chance.choice([each for each in self.buffers if each is not to])
        (begin, size), shift = self.part(), self.chance.randrange(2)
        begin_from = begin if not shift else 0
        arguments = (to.at(begin), source.at(begin_from), c_size_t(size))
        name = self.chance.choice(("cuMemcpyDtoD_v2", "cuMemcpy", "cuMemcpyDtoDAsync_v2", "cuMemcpyAsync"))
        cu(name, *arguments, *((self.stream,) if name.count("Async") else ()))
        cu("cuStreamSynchronize", self.stream)
        to.wanted[begin : begin + size] = source.wanted[begin_from : begin_from + size]

    def copy_rows(self, to: Buffer) -> None:
        source = self.chance.choice([each for each in self.buffers if each is not to])
        rows, width = self.chance.randrange(1, 16), self.chance.randrange(1, 200)
        order = Rows(from_type=DEVICE_MEMORY, from_device=source.pointer, from_pitch=256)
        order.to_type, order.to_device, order.to_pitch = DEVICE_MEMORY, to.pointer, 512
        order.width, order.height = width, rows
        cu("cuMemcpy2D_v2", byref(order))
        for row in range(rows):
            to.wanted[512 * row : 512 * row + width] = source.wanted[256 * row : 256 * row + width]

    def graph(self, to: Buffer) -> None:
        """A memset and a copy in a graph that is launched several times."""
        source = self.chance.choice([each for each in self.buffers if each is not to])
        graph, made = c_void_p(), c_void_p()
        (begin, size), value = self.part(), self.chance.randrange(256)
        cu("cuStreamBeginCapture_v2", self.stream, RELAXED)
        cu("cuMemsetD8Async", source.at(begin), value, c_size_t(size), self.stream)
        cu("cuMemcpyDtoDAsync_v2", to.at(begin), source.at(begin), c_size_t(size), self.stream)
        launch(kernel, self.stream)
        cu("cuStreamEndCapture", self.stream, byref(graph))
        cu("cuGraphInstantiateWithFlags", byref(made), graph, c_uint64(0))
        for _ in range(self.chance.randrange(1, 4)):
            cu("cuGraphLaunch", made, self.stream)
            cu("cuStreamSynchronize", self.stream)
        cu("cuGraphExecDestroy", made)
        cu("cuGraphDestroy", graph)
        source.wanted[begin : begin + size] = to.wanted[begin : begin + size] = bytes([value]) * size

    def word(self, to: Buffer) -> None:
        at, value = 4 * self.chance.randrange(SIZE // 4), self.chance.getrandbits(32)
        cu("cuStreamWriteValue32_v2", self.stream, to.at(at), value, 0)
        cu("cuEventRecord", self.event, self.stream)
        cu("cuEventSynchronize", self.event)
        to.wanted[at : at + 4] = value.to_bytes(4, sys.byteorder)

    def host_call(self, _: Buffer) -> None:
        before = self.called
        launch(kernel, self.stream)
        cu("cuLaunchHostFunc", self.stream, self.callback, None)
        cu("cuStreamSynchronize", self.stream)
        assert self.called == before + 1

    def read(self, of: Buffer) -> None:
        got = ctypes.create_string_buffer(SIZE)
        cu("cuMemcpyDtoH_v2", got, of.pointer, c_size_t(SIZE))
        assert got.raw == of.wanted, f"{of.kind}: other contents"

    def read_async(self, of: Buffer) -> None:
        cu("cuEventRecord", self.event, None)
        cu("cuStreamWaitEvent", self.stream, self.event, 0)
        cu("cuMemcpyDtoHAsync_v2", self.pinned, of.pointer, c_size_t(SIZE), self.stream)
        cu("cuStreamSynchronize", self.stream)
        assert self.pinned.value
        assert ctypes.string_at(self.pinned.value, SIZE) == of.wanted, f"{of.kind}: other contents"

    def exchange(self, of: Buffer) -> None:
        """Free memory and allocate other memory, of any kind."""
        of.give()
        self.buffers[self.buffers.index(of)] = Buffer(self.chance.choice(KINDS))

    def kernels(self, _: Buffer) -> None:
        for _ in range(20):
            launch(kernel, self.stream)
        cu("cuCtxSynchronize")


class Rows(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("from_x", c_size_t), ("from_y", c_size_t), ("from_type", ctypes.c_int), ("from_host", c_uint64),
        ("from_device", c_uint64), ("from_array", c_uint64), ("from_pitch", c_size_t),
        ("to_x", c_size_t), ("to_y", c_size_t), ("to_type", ctypes.c_int), ("to_host", c_uint64),
        ("to_device", c_uint64), ("to_array", c_uint64), ("to_pitch", c_size_t), ("width", c_size_t),
        ("height", c_size_t),
    )  # fmt: skip


DEVICE_MEMORY = 2
works: list[Work] = []


def work(seed: int, seconds: float) -> str:
    """Steps for that long; how many, or what is wrong."""
    if not works:
        works.append(Work(seed))
    end, steps = time.monotonic() + seconds, 0
    try:
        while time.monotonic() < end:
            works[0].step()
            steps += 1
        for each in works[0].buffers:
            works[0].read(each)
    except AssertionError as error:
        return f"after {steps} steps: {error}"
    return f"{steps} right"


def child(seed: int, seconds: float) -> str:
    """The same work in a program that this one starts, and that belongs to its tenant."""
    done = subprocess.run(
        [sys.executable, __file__], input=f"work({seed}, {seconds})\n", capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines()[-1] if not done.returncode else f"{done.returncode} {done.stderr[-500:]}"


def forks(count: int) -> str:
    """Fork children that do nothing with CUDA, and start programs; their exit codes."""
    codes = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            os._exit(0)
        codes.append(os.waitpid(child, 0)[1])
        codes.append(subprocess.run([sys.executable, "-S", "-c", ""], check=False).returncode)
    return str(max(codes))


print("ready", flush=True)
for line in sys.stdin:
    try:
        print(eval(line), flush=True)
    except CudaError as error:
        print(error, flush=True)
