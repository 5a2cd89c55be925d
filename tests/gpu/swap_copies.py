"""Why both directions at once are slower than each alone: what a move adds to copies, one thing after the other.

    PYTHONPATH=src python tests/gpu/swap_copies.py worker BYTES     # a process that copies as it is told

Every case moves BYTES out in one process and BYTES in in another (or both in one), from a common start, through the
driver API. Cases are interleaved, so that whatever else the machine does falls on all of them.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))

from cotenant.bench.driver import Driver

MIB = 1 << 20
GRANULE = 2 * MIB
SPAN = 256 * MIB  # registered at once, as the shim does
HUGEPAGE, POPULATE_WRITE, COLLAPSE = 14, 23, 25
LEAD_NS = 3_000_000

# host: what the host memory is; vmm: memory behind the addresses is made and unmade between copies; unit: of a copy
CASES: dict[str, dict[str, Any]] = {
    "one process, pinned": {"processes": 1, "host": "pinned", "unit": 1 << 40},
    "two, pinned, 1 GiB": {"host": "pinned", "unit": 1024 * MIB},
    "two, pinned, 256 MiB": {"host": "pinned", "unit": 256 * MIB},
    "two, pinned, 16 MiB": {"host": "pinned", "unit": 16 * MIB},
    "two, memfd": {"host": "memfd", "unit": 256 * MIB},
    "two, memfd, huge pages": {"host": "huge", "unit": 256 * MIB},
    "two, own memory, huge pages": {"host": "own", "unit": 256 * MIB},
    "two, huge, mapping 64 MiB": {"host": "huge", "unit": 64 * MIB, "vmm": True},
    "two, huge, mapping 256 MiB": {"host": "huge", "unit": 256 * MIB, "vmm": True},
    "two, huge, mapping 1 GiB": {"host": "huge", "unit": 1024 * MIB, "vmm": True},
    "two, pinned, mapping 256 MiB": {"host": "pinned", "unit": 256 * MIB, "vmm": True},
    "two, pinned, mapping only out": {"host": "pinned", "unit": 256 * MIB, "vmm": "out"},
    "two, pinned, mapping only in": {"host": "pinned", "unit": 256 * MIB, "vmm": "in"},
}
ALONE = ("one process, pinned", "two, memfd", "two, memfd, huge pages", "two, huge, mapping 256 MiB")


# ---- host memory -----------------------------------------------------------------------------------------------------


class Memory:
    """Host memory of one kind, registered with the driver; `huge_kb`: how much of it lies on huge pages."""

    def __init__(self, cuda: Driver, kind: str, size: int) -> None:
        began = time.monotonic()
        self.huge_kb = 0
        if kind == "pinned":
            pointer = ctypes.c_void_p()
            cuda.call("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(size), 0)
            self.address = int(pointer.value or 0)
        else:
            fd = -1 if kind == "own" else os.memfd_create("cotenant-copies")
            if fd >= 0:
                os.ftruncate(fd, size)
            self.address = _map_aligned(fd, size)
            if kind == "own":
                _advise(self.address, size, HUGEPAGE)
            if kind == "huge":
                _advise(self.address, size, COLLAPSE)
            _advise(self.address, size, POPULATE_WRITE)
            for at in range(0, size, SPAN):
                length = ctypes.c_size_t(min(SPAN, size - at))
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
    flags = anonymous if fd < 0 else mmap.MAP_SHARED
    return int(_libc.mmap(at, size, mmap.PROT_READ | mmap.PROT_WRITE, flags | MAP_FIXED, fd, 0))


def _advise(address: int, size: int, advice: int) -> None:
    _libc.madvise(address, size, advice)  # an old kernel says no: the case is then as if it were not asked for


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


# ---- one direction ---------------------------------------------------------------------------------------------------


class Device:
    """Device memory: plain, and an address range behind which memory comes and goes."""

    def __init__(self, cuda: Driver, size: int) -> None:
        self.cuda, self.size = cuda, size
        plain, space = ctypes.c_uint64(), ctypes.c_uint64()
        cuda.call("cuMemAlloc_v2", ctypes.byref(plain), ctypes.c_size_t(size))
        cuda.call(
            "cuMemAddressReserve", ctypes.byref(space), ctypes.c_size_t(size), ctypes.c_size_t(GRANULE), *_zeros(2)
        )
        self.plain, self.space = plain.value, space.value
        self.prop = (ctypes.c_uint8 * 32)()
        ctypes.c_int.from_buffer(self.prop, 0).value = 1  # pinned
        ctypes.c_int.from_buffer(self.prop, 8).value = 1  # on device 0
        self.access = (ctypes.c_int * 3)(1, 0, 3)

    def fill(self, at: int, size: int) -> None:
        """Memory behind part of the range."""
        handle, length = ctypes.c_uint64(), ctypes.c_size_t(size)
        address = ctypes.c_uint64(self.space + at)
        self.cuda.call("cuMemCreate", ctypes.byref(handle), length, self.prop, *_zeros(1))
        self.cuda.call("cuMemMap", address, length, ctypes.c_size_t(0), handle, *_zeros(1))
        self.cuda.call("cuMemRelease", handle)
        self.cuda.call("cuMemSetAccess", address, length, self.access, ctypes.c_size_t(1))

    def empty(self, at: int, size: int) -> None:
        """None behind it."""
        self.cuda.call("cuMemUnmap", ctypes.c_uint64(self.space + at), ctypes.c_size_t(size))


def _zeros(count: int) -> list[ctypes.c_uint64]:
    return [ctypes.c_uint64(0)] * count


class Way:
    """One direction of one case: pieces queued some ahead, as the shim's mover does it."""

    def __init__(self, cuda: Driver, device: Device, host: int, way: str, unit: int, vmm: bool, stream: Any) -> None:
        self.cuda, self.device, self.host, self.stream = cuda, device, host, stream
        self.out, self.vmm = way == "out", vmm
        self.parts = [(at, min(unit, device.size - at)) for at in range(0, device.size, unit)]
        self.ahead = 8
        self.events = [cuda.event() for _ in range(self.ahead)]
        self.begun = self.ended = 0
        self.mapping_s = self.end_s = 0.0
        if vmm and self.out:
            for at, size in self.parts:
                device.fill(at, size)

    def _timed(self, call: Any, at: int, size: int) -> None:
        began = time.monotonic()
        call(at, size)
        self.mapping_s += time.monotonic() - began

    def start(self) -> bool:
        """Queue one more part, if there is one."""
        if self.begun == len(self.parts) or self.begun - self.ended >= self.ahead:
            return False
        at, size = self.parts[self.begun]
        if self.vmm and not self.out:
            self._timed(self.device.fill, at, size)
        device = ctypes.c_uint64((self.device.space if self.vmm else self.device.plain) + at)
        host, length = ctypes.c_void_p(self.host + at), ctypes.c_size_t(size)
        if self.out:
            self.cuda.call("cuMemcpyDtoHAsync_v2", host, device, length, self.stream)
        else:
            self.cuda.call("cuMemcpyHtoDAsync_v2", device, host, length, self.stream)
        self.cuda.record(self.events[self.begun % self.ahead], self.stream)
        self.begun += 1
        return True

    def land(self) -> bool:
        """Wait for the oldest part; False when all have ended."""
        if self.ended == len(self.parts):
            return False
        self.cuda.wait(self.events[self.ended % self.ahead])
        if self.vmm and self.out:
            self._timed(self.device.empty, *self.parts[self.ended])
        self.ended += 1
        self.end_s = time.monotonic()
        return True

    def clear(self) -> None:
        """What the way in left behind."""
        if self.vmm and not self.out:
            for at, size in self.parts:
                self.device.empty(at, size)
        for event in self.events:
            self.cuda.call("cuEventDestroy_v2", event)


def worker(size: int) -> None:
    """Serve orders: `make KIND`, `run {"ways", "host", "unit", "vmm", "start_ns"}`."""
    cuda = Driver(os.environ.get("COTENANT_BENCH_LIBRARY", "libcuda.so.1"))
    device = Device(cuda, size)
    second = Device(cuda, size)
    memory: dict[str, Memory] = {}
    other: dict[str, Memory] = {}  # for the second direction of one process
    streams = {way: cuda.stream() for way in ("out", "in")}
    print(json.dumps({"gpu": cuda.name}), flush=True)
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "make":
            memory[rest] = Memory(cuda, rest, size)
            if rest == "pinned":
                other[rest] = Memory(cuda, rest, size)
            print(json.dumps({"huge_kb": memory[rest].huge_kb, "made_s": memory[rest].made_s}), flush=True)
        elif word == "run":
            order = json.loads(rest)
            kind = order["host"]
            ways = []
            for index, way in enumerate(order["ways"]):
                host = (other if index else memory)[kind].address
                vmm = order["vmm"] is True or order["vmm"] == way
                ways.append(Way(cuda, second if index else device, host, way, order["unit"], vmm, streams[way]))
            print(json.dumps(_run(cuda, ways, order["start_ns"])), flush=True)


def _run(cuda: Driver, ways: list[Way], start_ns: int) -> dict[str, Any]:
    cuda.synchronise()
    late_ns = time.monotonic_ns() - start_ns
    while time.monotonic_ns() < start_ns:
        pass
    more = True
    while more:
        more = False
        for way in ways:
            while way.start():
                pass
        for way in ways:
            more = way.land() or more
    for way in ways:
        way.clear()
    return {
        "late_ns": max(0, late_ns),
        "ways": {
            "out" if way.out else "in": {"seconds": way.end_s - start_ns / 1e9, "mapping_s": way.mapping_s}
            for way in ways
        },
    }


# ---- the experiment --------------------------------------------------------------------------------------------------


class Worker:
    """The controller's end of a worker."""

    def __init__(self, size: int, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "worker", str(size)],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.gpu = self.answer()["gpu"]

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a copying process ended ({self.process.wait()})")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def one_round(workers: list[Worker], case: dict[str, Any], ways: tuple[str, ...]) -> dict[str, float]:
    """GB/s of each way and of both, and mapping time in ms, of one run of a case."""
    # making memory before the start takes its time
    lead_ns = LEAD_NS * (20 if case.get("vmm") else 1)
    order = {"host": case["host"], "unit": case["unit"], "vmm": case.get("vmm", False)}
    order["start_ns"] = time.monotonic_ns() + lead_ns
    one = case.get("processes") == 1
    asked = [(workers[0], ways)] if one else [(workers[0 if way == "out" else 1], (way,)) for way in ways]
    for process, parts in asked:
        process.tell("run " + json.dumps(order | {"ways": parts}))
    found: dict[str, float] = {"late_ms": 0.0}
    seconds = []
    size = case["bytes"]
    for process, _ in asked:
        answer = process.answer()
        found["late_ms"] = max(found["late_ms"], answer["late_ns"] / 1e6)
        for way, took in answer["ways"].items():
            seconds.append(took["seconds"])
            found[f"{way}_gbps"] = size / took["seconds"] / 1e9
            found[f"{way}_mapping_ms"] = took["mapping_s"] * 1e3
    found["gbps"] = size / max(seconds) / 1e9
    return found


def table(workers: list[Worker], cases: dict[str, dict[str, Any]], size: int, until: float) -> dict[str, Any]:
    """Medians per case over interleaved rounds."""
    rows: dict[str, list[dict[str, float]]] = {}
    rounds = 0
    while rounds < 2 or (rounds < 12 and time.monotonic() < until):
        for name, case in cases.items():
            todo = [(name, ("out", "in"))]
            todo += [(f"{name}: {way} alone", (way,)) for way in ("out", "in")] if name in ALONE else []
            for label, ways in todo:
                rows.setdefault(label, []).append(one_round(workers, case | {"bytes": size}, ways))
        rounds += 1
    return {
        name: {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]} | {"rounds": len(runs)}
        for name, runs in rows.items()
    }


@contextmanager
def pair(size: int, environment: dict[str, str], kinds: list[str]) -> Iterator[tuple[list[Worker], dict[str, Any]]]:
    """Two workers with memory of these kinds, and what was said of it."""
    workers: list[Worker] = []
    try:
        workers += [Worker(size, environment), Worker(size, environment)]
        made = {}
        for kind in kinds:
            for each in workers:
                each.tell(f"make {kind}")
            made[kind] = [each.answer() for each in workers]
        yield workers, made
    finally:
        for each in workers:
            each.close()


def under_mps(size: int, seconds: float) -> dict[str, Any]:
    """The same under a control daemon of its own: both processes then share the GPU without taking turns."""
    names = ("two, pinned, 256 MiB", "two, pinned, mapping 256 MiB")
    with tempfile.TemporaryDirectory(prefix="cot-mps-") as folder:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=os.environ | environment, check=True, timeout=20)
        try:
            with pair(size, environment, ["pinned"]) as (workers, _):
                return table(workers, {name: CASES[name] for name in names}, size, time.monotonic() + seconds)
        finally:
            quit_it = {"input": "quit\n", "text": True, "env": os.environ | environment}
            subprocess.run(["nvidia-cuda-mps-control"], check=False, timeout=30, **quit_it)  # type: ignore[call-overload]


def machine() -> dict[str, str]:
    """What of the machine may matter."""
    facts = {"kernel": os.uname().release, "nodes": str(len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))}
    for name in ("enabled", "shmem_enabled"):
        path = Path("/sys/kernel/mm/transparent_hugepage") / name
        facts[name] = path.read_text().strip() if path.exists() else "none"
    return facts


def experiment(size: int, seconds: float, environment: dict[str, str], mps: bool) -> dict[str, Any]:
    """All cases within about that many seconds; GB/s are 1e9 bytes, of each way."""
    until = time.monotonic() + seconds * (0.75 if mps else 1.0)
    found: dict[str, Any] = {"bytes": size, "machine": machine()}
    with pair(size, environment, ["pinned", "memfd", "huge", "own"]) as (workers, made):
        found["gpu"] = workers[0].gpu
        found["memory"] = made
        found["cases"] = table(workers, CASES, size, until)
    if mps:
        try:
            found["mps"] = under_mps(size, seconds * 0.1)
        except Exception as error:
            found["mps"] = {"error": repr(error)}
    return found


if __name__ == "__main__":
    worker(int(sys.argv[2]))
