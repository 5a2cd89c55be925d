"""Measures the GPU time of processes by the driver's log of context switches, which says when each process was on the
GPU's compute engine.

The driver writes a record of each switch into a buffer that this process allocates (the event buffer that profilers
use, driver releases 550 to 595); a buffer of root has records of all users' processes. While a process is alone, no
records are written: it counts as running until another process is switched in. Numbers and layouts are those of the
driver's public sources.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterable

from cotenant.core.errors import WorkError
from cotenant.devices.meters import Held
from cotenant.policy.shares.slice_tenant import Usage

RECORDS, RECORD_BYTES = 1 << 14, 32
STARTS, ENDS = 6, 7  # tags of the records that mark the start and the end of a process's run on the GPU
# part of a run in which the GPU saves and restores state instead of working for the process; subtracted from short runs
SAVING_NS = 100_000
SHORT_NS = 5_000_000  # a process's run on the GPU that lasts less than this is a short one
ROOT, DEVICE, SUBDEVICE, MEMORY, BUFFER = 0x41, 0x80, 0x2080, 0x3E, 0x90CD
BIND, ENABLE, SET_GET, FLUSH = 0x20801238, 0x90CD0101, 0x90CD0102, 0x90CD0104
UUID_INFO, UUID_BYTES, BINARY = 0x274, 256, 2
CACHED_READ_ONLY = ((1 << 29) | (1 << 27) | (1 << 25), 1 << 22)


def _request(number: int, size: int) -> int:
    return 3 << 30 | size << 16 | ord("F") << 8 | number


class Runs:
    """Sums up the log's records to the GPU time of each process. A run is the time from a process's switch onto the GPU
    to its switch off.

    `whole_ns`: pid -> length of a run that lasts for the process's whole time slice. The log does not say why a run
    ended; a shorter run is taken to have ended because the process had no more work.
    """

    def __init__(self) -> None:
        self.whole_ns: dict[int, int] = {}
        # pid of the running process, and the GPU's time at which its run began
        self._running: tuple[int, int] | None = None
        self._had: dict[int, Usage] = {}

    def note(self, tag: int, pid: int, when_ns: int) -> None:
        """Count a record of the log. Records other than the start or the end of a run are skipped."""
        if tag == STARTS:
            self._running = (pid, when_ns)
        elif tag == ENDS and self._running is not None and self._running[0] == pid:
            length_ns = max(0, when_ns - self._running[1])
            self._running = None
            early = length_ns < 0.9 * self.whole_ns.get(pid, 0)
            length_ns -= min(length_ns, SAVING_NS) if length_ns < SHORT_NS else 0
            before = self._had.get(pid, Usage())
            self._had[pid] = Usage(before.busy_ns + length_ns, before.runs + 1, before.yields + early)

    def until(self, now_ns: int) -> dict[int, Usage]:
        """Return the GPU time that each process has used so far, including its present run."""
        found = dict(self._had)
        if self._running is not None:
            pid, since_ns = self._running
            before = found.get(pid, Usage())
            found[pid] = before._replace(busy_ns=before.busy_ns + max(0, now_ns - since_ns))
        return found


class SwitchLog:
    """Meter of the GPU time that processes use on one GPU. Creating it raises WorkError if the driver does not provide
    the log of context switches.
    """

    def __init__(self, uuid: str, minor: int) -> None:
        """`minor`: number of the GPU's device file, which is not the driver's own number of the GPU."""
        self._files: list[int] = []
        self._handle = 0xCAFE0000
        self._runs = Runs()
        self._get = 0
        if os.geteuid() != 0:
            raise WorkError("the driver names processes in its log of context switches only to root")
        try:
            self._ctl = self._open("/dev/nvidiactl")
            self._open(f"/dev/nvidia{minor}")
            self._make(uuid)
        except OSError as error:
            self.close()
            raise WorkError(f"the driver's log of context switches cannot be opened: {error.strerror}") from None
        except WorkError:
            self.close()
            raise

    def read(self, held: Iterable[Held]) -> dict[int, Usage]:
        """See Meter. Pids are those of this process's PID namespace."""
        self._runs.whole_ns = {each.pid: each.run_us * 1000 for each in held}
        self._control(self._buffer, FLUSH, bytearray())
        put = struct.unpack_from("=I", self._header, 4)[0] % RECORDS
        while self._get != put:
            at = self._get * RECORD_BYTES
            tag = self._records[at + 8]
            pid = struct.unpack_from("=I", self._records, at + 16)[0]
            when_ns = struct.unpack_from("=Q", self._records, at + 24)[0]
            self._runs.note(tag, pid, when_ns)
            self._get = (self._get + 1) % RECORDS
        self._control(self._buffer, SET_GET, bytearray(struct.pack("=II", self._get, 0)))
        return self._runs.until(time.time_ns())

    def close(self) -> None:
        """See Meter."""
        for fd in self._files:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._files.clear()

    # -- the driver's objects --------------------------------------------------------------------------------------

    def _make(self, uuid: str) -> None:
        self._client = self._alloc(0, 0, ROOT, bytearray(), handle=0)
        device = bytearray(56)
        struct.pack_into("=I", device, 0, self._instance(uuid))
        self._device = self._alloc(self._client, self._client, DEVICE, device)
        self._subdevice = self._alloc(self._client, self._device, SUBDEVICE, bytearray(4))
        self._header, header = self._memory(mmap.PAGESIZE)
        self._records, records = self._memory(RECORDS * RECORD_BYTES)
        event = self._open("/dev/nvidiactl")
        order = bytearray(struct.pack("=IIII", self._client, self._device, event, 0))
        fcntl.ioctl(event, _request(206, 16), order, True)
        params = bytearray(72)
        struct.pack_into("=QQIIQIIQIIIIII", params, 0, 0, 0, RECORD_BYTES, RECORDS, 0, 0, 0, event, 0,
                         self._subdevice, 0, header, records, 0)  # fmt: skip
        self._buffer = self._alloc(self._client, self._client, BUFFER, params)
        self._control(self._subdevice, BIND, bytearray(struct.pack("=IIIIBxxxI", self._buffer, 24, 1, 0, 1, 0)))
        self._control(self._buffer, ENABLE, bytearray(struct.pack("=BxxxI", 1, 0)))

    def _instance(self, uuid: str) -> int:
        """Return the number by which the driver knows a GPU."""
        asked = bytearray(UUID_BYTES + 16)
        digits = uuid.removeprefix("GPU-").replace("-", "")
        struct.pack_into(f"={UUID_BYTES}sI", asked, 0, bytes.fromhex(digits), BINARY)
        self._control(self._client, UUID_INFO, asked)
        return int(struct.unpack_from("=I", asked, UUID_BYTES + 8)[0])

    def _open(self, path: str) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._files.append(fd)
        return fd

    def _alloc(self, client: int, parent: int, kind: int, params: bytearray, handle: int | None = None) -> int:
        if handle is None:
            self._handle += 1
            handle = self._handle
        held = (ctypes.c_char * len(params)).from_buffer(params) if params else None
        address = ctypes.addressof(held) if held is not None else 0
        order = bytearray(struct.pack("=IIIIQQIIII", client, parent, handle, kind, address, 0, len(params), 0, 0, 0))
        fcntl.ioctl(self._ctl, _request(0x2B, 48), order, True)
        del held
        status = struct.unpack_from("=I", order, 40)[0]
        if status:
            raise WorkError(f"the driver gives no log of context switches (object {kind:#x}: status {status:#x})")
        return int(struct.unpack_from("=I", order, 8)[0])

    def _memory(self, size: int) -> tuple[mmap.mmap, int]:
        params = bytearray(128)
        struct.pack_into("=12I7Q5I", params, 0, self._client, 0, 0, 0, 0, 0, *CACHED_READ_ONLY, 0, 0, 0, 0,
                         0, 0, size, 0, 0, 0, 0, 0, 0, 0, 0, 0)  # fmt: skip
        handle = self._alloc(self._client, self._device, MEMORY, params)
        fd = self._open("/dev/nvidiactl")
        order = bytearray(struct.pack("=IIIIQQQIIi4x", self._client, self._device, handle, 0, 0, size, 0, 0, 1, fd))
        fcntl.ioctl(self._ctl, _request(0x4E, len(order)), order, True)
        status = struct.unpack_from("=I", order, 40)[0]
        if status:
            raise WorkError(f"the driver gives no log of context switches (mapping: status {status:#x})")
        return mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ), handle

    def _control(self, target: int, command: int, params: bytearray) -> None:
        held = (ctypes.c_char * len(params)).from_buffer(params) if params else None
        address = ctypes.addressof(held) if held is not None else 0
        order = bytearray(struct.pack("=IIIIQII", self._client, target, command, 0, address, len(params), 0))
        fcntl.ioctl(self._ctl, _request(0x2A, 32), order, True)
        del held
        status = struct.unpack_from("=I", order, 28)[0]
        if status:
            raise WorkError(f"the driver gives no log of context switches (control {command:#x}: status {status:#x})")
