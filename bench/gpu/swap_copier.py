"""A process that copies and moves memory by orders, through the driver API: one direction of swap_copies.py.

PYTHONPATH=src python bench/gpu/swap_copier.py BYTES SPAN FD
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))

from cotenant.bench.driver import Driver
from cotenant.core.errors import WorkError

GRANULE = 2 << 20
HUGEPAGE, POPULATE_WRITE, COLLAPSE = 14, 23, 25
PARTNER_S = 5.0


# ---- host memory -----------------------------------------------------------------------------------------------------


class Memory:
    """Host memory of one kind. `span`: size of a registration with the driver; `huge_kb`: how much lies on huge
    pages."""

    def __init__(self, cuda: Driver, kind: str, size: int, span: int) -> None:
        began = time.monotonic()
        self.huge_kb, self.span = 0, size
        if kind == "pinned":
            pointer = ctypes.c_void_p()
            cuda.call("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(size), 0)
            self.address = int(pointer.value or 0)
        else:
            fd = os.memfd_create("cotenant-copies")
            os.ftruncate(fd, size)
            self.address, self.span = _map_aligned(fd, size), span
            _advise(self.address, size, HUGEPAGE)
            _advise(self.address, size, COLLAPSE)
            _advise(self.address, size, POPULATE_WRITE)
            for at in range(0, size, span):
                length = ctypes.c_size_t(min(span, size - at))
                cuda.call("cuMemHostRegister_v2", ctypes.c_void_p(self.address + at), length, 1)
            self.huge_kb = _huge_kb(self.address)
        self.made_s = time.monotonic() - began


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000


def _map_aligned(fd: int, size: int) -> int:
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    span = _libc.mmap(None, size + GRANULE, 0, anonymous | MAP_NORESERVE, -1, 0)
    at = (span + GRANULE - 1) // GRANULE * GRANULE
    return int(_libc.mmap(at, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, fd, 0))


def _advise(address: int, size: int, advice: int) -> None:
    # an old kernel does not know the advice; the case then equals the one without it
    _libc.madvise(address, size, advice)


def _huge_kb(address: int) -> int:
    within, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            begin, _, end = words[0].partition("-")
            within = int(begin, 16) <= address < int(end, 16)
        elif within and words[0] in ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:"):
            found += int(words[1])
    return found


# ---- device memory ---------------------------------------------------------------------------------------------------


def _zeros(count: int) -> list[ctypes.c_uint64]:
    return [ctypes.c_uint64(0)] * count


class Device:
    """Device memory: an ordinary allocation, and an address range to which memory is mapped and unmapped."""

    def __init__(self, cuda: Driver, size: int) -> None:
        self.cuda, self.size = cuda, size
        plain, space = ctypes.c_uint64(), ctypes.c_uint64()
        cuda.call("cuMemAlloc_v2", ctypes.byref(plain), ctypes.c_size_t(size))
        lengths = (ctypes.c_size_t(size), ctypes.c_size_t(GRANULE))
        cuda.call("cuMemAddressReserve", ctypes.byref(space), *lengths, *_zeros(2))
        self.plain, self.space = plain.value, space.value
        self.prop = (ctypes.c_uint8 * 32)()
        ctypes.c_int.from_buffer(self.prop, 0).value = 1  # the type of the memory: pinned
        ctypes.c_int.from_buffer(self.prop, 8).value = 1  # the type of its location: a device (whose number is 0)
        self.access = (ctypes.c_int * 3)(1, 0, 3)

    def create(self, size: int, shared: bool = False) -> ctypes.c_uint64:
        """Create memory. `shared`: it can be passed to other processes as a file descriptor."""
        ctypes.c_int.from_buffer(self.prop, 4).value = int(shared)
        handle = ctypes.c_uint64()
        self.cuda.call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), self.prop, *_zeros(1))
        return handle

    def place(self, at: int, size: int, handle: ctypes.c_uint64, keep: bool = False) -> None:
        """Map memory to a part of the range."""
        address, length = ctypes.c_uint64(self.space + at), ctypes.c_size_t(size)
        self.cuda.call("cuMemMap", address, length, ctypes.c_size_t(0), handle, *_zeros(1))
        if not keep:
            self.cuda.call("cuMemRelease", handle)
        self.cuda.call("cuMemSetAccess", address, length, self.access, ctypes.c_size_t(1))

    def empty(self, at: int, size: int) -> None:
        """Unmap a part of the range."""
        self.cuda.call("cuMemUnmap", ctypes.c_uint64(self.space + at), ctypes.c_size_t(size))

    def give(self, link: socket.socket, handle: ctypes.c_uint64) -> None:
        """Send memory to the other process."""
        fd = ctypes.c_int()
        self.cuda.call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, 1, *_zeros(1))
        self.cuda.call("cuMemRelease", handle)
        socket.send_fds(link, [b"x"], [fd.value])
        os.close(fd.value)

    def take(self, link: socket.socket) -> ctypes.c_uint64:
        """Receive memory from the other process."""
        _, fds, _, _ = socket.recv_fds(link, 1, 1)
        handle = ctypes.c_uint64()
        self.cuda.call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fds[0]), 1)
        os.close(fds[0])
        return handle


# ---- one direction ---------------------------------------------------------------------------------------------------


class Way:
    """One direction of a case. Some parts are queued ahead, as by the shim."""

    AHEAD = 8

    def __init__(self, cuda: Driver, device: Device, host: Memory, way: str, case: dict[str, Any], link: Any) -> None:
        self.cuda, self.device, self.host, self.link, self.case = cuda, device, host, link, case
        self.way, self.mode = way, case.get(way, "plain")
        unit = int(case.get("unit", 1) * case["span"])
        self.most = min(host.span, int(case.get("copy", unit) * (case["span"] if "copy" in case else 1)))
        self.parts = [(at, min(unit, device.size - at)) for at in range(0, device.size, unit)]
        self.stream = self._stream(way in case.get("priority", ()))
        self.events = [cuda.event() for _ in range(self.AHEAD)]
        self.handles: dict[int, ctypes.c_uint64] = {}
        self.there: set[int] = set()  # indices of the parts to which memory is mapped
        self.begun = self.ended = 0
        self.mapping_s = self.end_s = 0.0
        self.ready = threading.Semaphore(0)
        self.fault: Exception | None = None
        for at, size in self.parts if self.mode in ("free", "late", "keep", "give", "map") else ():
            handle = device.create(size, self.mode == "give")
            if self.mode != "map":
                device.place(at, size, handle, keep=self.mode in ("keep", "give"))
                self.there.add(at)
            if self.mode in ("keep", "give", "map"):
                self.handles[at] = handle

    def _stream(self, urgent: bool) -> ctypes.c_void_p:
        stream, least, most = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        if urgent:
            self.cuda.call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(most))
        self.cuda.call("cuStreamCreateWithPriority", ctypes.byref(stream), 1, most.value)
        return stream

    def go(self) -> None:
        """Run the case from the common start time."""
        if self.case.get("thread") and self.way == "in":
            context = ctypes.c_void_p()
            self.cuda.call("cuCtxGetCurrent", ctypes.byref(context))
            self.mapper = threading.Thread(target=self._map_all, args=(context,))
            self.mapper.start()

    def _map_all(self, context: ctypes.c_void_p) -> None:
        try:
            self.cuda.call("cuCtxSetCurrent", context)
            for at, size in self.parts:
                self._fill(at, size)
                self.ready.release()
        except Exception as error:
            self.fault = error
            self.ready.release()

    def _fill(self, at: int, size: int) -> None:
        if self.case.get("paced"):
            assert self.link.recv(1)
        began = time.monotonic()
        if self.mode == "map":
            handle = self.handles.pop(at)
        else:
            handle = self.device.take(self.link) if self.mode == "take" else self.device.create(size)
        last = self.mode == "take" and at == self.parts[-1][0]
        self.device.place(at, size, handle, keep=last)
        if last:
            self.handles[at] = handle
        self.there.add(at)
        self.mapping_s += time.monotonic() - began

    def start(self) -> bool:
        """Queue the next part, if there is one."""
        if self.begun == len(self.parts) or self.begun - self.ended >= self.AHEAD:
            return False
        at, size = self.parts[self.begun]
        if self.case.get("thread") and self.way == "in":
            self.ready.acquire()
            if self.fault is not None:
                raise self.fault
        elif self.way == "in" and self.mode != "plain":
            self._fill(at, size)
        base = self.device.plain if self.mode == "plain" else self.device.space
        for done in range(at, at + size, self.most):
            length = ctypes.c_size_t(min(self.most, at + size - done))
            self._copy(ctypes.c_uint64(base + done), ctypes.c_void_p(self.host.address + done), length)
        self.cuda.record(self.events[self.begun % self.AHEAD], self.stream)
        self.begun += 1
        return True

    def _copy(self, device: Any, host: Any, length: Any) -> None:
        if self.way == "out":
            self.cuda.call("cuMemcpyDtoHAsync_v2", host, device, length, self.stream)
        elif self.case.get("engine") == "other":
            self.cuda.call("cuMemcpyDtoDAsync_v2", device, host, length, self.stream)
        else:
            self.cuda.call("cuMemcpyHtoDAsync_v2", device, host, length, self.stream)

    def land(self) -> bool:
        """Wait for the oldest part; False if all have ended."""
        if self.ended == len(self.parts):
            return False
        at, size = self.parts[self.ended]
        self.cuda.wait(self.events[self.ended % self.AHEAD])
        self.ended += 1
        began = time.monotonic()
        if self.way == "out" and self.mode in ("free", "keep", "give"):
            self._leave(at, size)
            if self.mode == "give":
                self.device.give(self.link, self.handles.pop(at))
        if self.mode == "late" and self.ended == len(self.parts):
            for part in self.parts:
                self._leave(*part)
        self.end_s = time.monotonic()
        self.mapping_s += self.end_s - began
        if self.way == "out" and self.case.get("paced"):
            self.link.send(b"x")
        return True

    def _leave(self, at: int, size: int) -> None:
        self.device.empty(at, size)
        self.there.discard(at)

    def goes_on(self) -> int:
        """Find out whether memory received from another process can be passed on; returns the driver's error code."""
        fd = ctypes.c_int(-1)
        try:
            handle = next(iter(self.handles.values()))
            self.cuda.call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, 1, *_zeros(1))
        except WorkError as error:
            return int(str(error).rpartition(" ")[2])
        os.close(fd.value)
        return 0

    def clear(self) -> None:
        """Release everything, also after an error."""
        if self.case.get("thread") and self.way == "in" and hasattr(self, "mapper"):
            self.mapper.join()
        self.cuda.synchronise()
        for at, size in self.parts:
            if at in self.there:
                self._leave(at, size)
        for handle in self.handles.values():
            self.cuda.call("cuMemRelease", handle)
        for event in self.events:
            self.cuda.call("cuEventDestroy_v2", event)
        self.cuda.call("cuStreamDestroy_v2", self.stream)


def worker(size: int, span: int, fd: int) -> None:
    """Serve orders: `make KIND`, `run {a case with "ways" and "start_ns"}`."""
    cuda = Driver()
    link = socket.socket(fileno=fd)
    link.settimeout(PARTNER_S)
    devices = [Device(cuda, size)]
    memory: dict[tuple[str, int], Memory] = {}
    print(json.dumps({"gpu": cuda.name}), flush=True)
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "make":
            made = memory[rest, 0] = Memory(cuda, rest, size, span)
            print(json.dumps({"huge_kb": made.huge_kb, "made_s": round(made.made_s, 2)}), flush=True)
            continue
        case = json.loads(rest) | {"span": span}
        _drain(link)
        kind = case.get("host", "pinned")
        ways: list[Way] = []
        try:
            for index, way in enumerate(case["ways"]):
                if index == len(devices):  # both directions are copied by one process
                    devices.append(Device(cuda, size))
                if (kind, index) not in memory:
                    memory[kind, index] = Memory(cuda, kind, size, span)
                ways.append(Way(cuda, devices[index], memory[kind, index], way, case, link))
            answer = _run(cuda, ways, case["start_ns"])
        except Exception as error:  # a case that fails must not prevent the others
            answer = {"error": repr(error)}
        for each in ways:
            each.clear()
        print(json.dumps(answer), flush=True)


def _drain(link: socket.socket) -> None:
    """Empty the socket after a failed case."""
    link.setblocking(False)
    try:
        while link.recv(4096):
            pass
    except BlockingIOError:
        pass
    link.settimeout(PARTNER_S)


def _run(cuda: Driver, ways: list[Way], start_ns: int) -> dict[str, Any]:
    cuda.synchronise()
    late_ns = time.monotonic_ns() - start_ns
    while time.monotonic_ns() < start_ns:
        pass
    for way in ways:
        way.go()
    more = True
    while more:
        more = False
        for way in ways:
            while way.start():
                pass
        for way in ways:
            more = way.land() or more
    seconds = {way.way: {"seconds": way.end_s - start_ns / 1e9, "mapping_s": way.mapping_s} for way in ways}
    for way in ways:
        if way.mode == "take":
            seconds[way.way]["handed_on"] = way.goes_on()
    return {"late_ns": max(0, late_ns), "ways": seconds}


if __name__ == "__main__":
    worker(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
