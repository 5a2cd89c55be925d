"""Memory, clocks, power, processes and memory limits of GPUs, by NVML through ctypes.

This module does not use NVML's Python package. An agent that runs from source may not have that package, and the
package could not load the library of the software GPU.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

CLOCK_SM, CLOCK_MEMORY = 1, 2  # nvmlClockType_t
TEMPERATURE_GPU = 0
MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}  # nvmlComputeMode_t
TEXT_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE, NVML_DEVICE_NAME_V2_BUFFER_SIZE
LIKELY_PROCESSES = 1024
REOPEN_S = 30.0  # least time between two attempts to open NVML again: a GPU that is lost for good must not cost more
NO_LIMIT = (1 << 64) - 1  # NVML_DEVICE_MEMORY_LIMIT_MAX
# nvmlReturn_t
UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, INSUFFICIENT_SIZE = 1, 2, 3, 4, 6, 7
DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND, GPU_IS_LOST, RESET_REQUIRED = 9, 13, 15, 16
# errors that may last until NVML is closed and opened again
REOPEN = (UNINITIALIZED, DRIVER_NOT_LOADED, GPU_IS_LOST, RESET_REQUIRED)
# bits of nvmlClocksEventReasons, which say why the clock is not the highest
WHY = {"power_cap": 0x4, "thermal": 0x20 | 0x40, "slowdown": 0x8 | 0x80}


class Memory(NamedTuple):
    """Total and free memory of a GPU in bytes."""

    total_bytes: int
    free_bytes: int


class MemoryLimits(NamedTuple):
    """A control group's memory limits on one GPU, as the driver reports them. `hard_bytes` NO_LIMIT: no limit."""

    soft_bytes: int
    hard_bytes: int
    used_bytes: int


class _Limits(ctypes.Structure):
    """The structure nvmlGetMemoryLimits_v1_t. It also serves as nvmlSetMemoryLimits_v1_t, which has the same fields
    except the last one, `used`."""

    _fields_ = (("group", ctypes.c_char_p), ("soft", ctypes.c_uint64), ("hard", ctypes.c_uint64),
                ("used", ctypes.c_uint64))  # fmt: skip


class _Pci(ctypes.Structure):
    """nvmlPciInfo_t."""

    _fields_ = (("legacy_id", ctypes.c_char * 16), ("numbers", ctypes.c_uint * 5), ("bus_id", ctypes.c_char * 32))


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t."""

    _fields_ = (
        ("pid", ctypes.c_uint), ("bytes", ctypes.c_ulonglong), ("instance", ctypes.c_uint), ("compute", ctypes.c_uint)
    )  # fmt: skip


class NvmlError(OSError):
    """Raised if NVML refuses a call. `code`: the nvmlReturn_t."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class _Session:
    """An open NVML library. A process opens each library once and keeps it open, because opening takes many calls of
    the kernel driver, for which the process's other calls wait. All threads share it. A forked process must not use it.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """Open the library. Raises NvmlError."""
        self._library, self._pid = library, os.getpid()
        self._broken, self._tried_s = False, time.monotonic()
        self.call("nvmlInit_v2")

    def mend(self) -> None:
        """If a call has failed with one of the errors REOPEN, close NVML and open it again, at most once in REOPEN_S.
        Raises NvmlError if NVML cannot be opened.
        """
        if self._broken and time.monotonic() - self._tried_s >= REOPEN_S:
            self._tried_s = time.monotonic()
            with suppress(NvmlError):  # fails if NVML is not open
                self.call("nvmlShutdown")
            self.call("nvmlInit_v2")
            self._broken = False

    def call(self, name: str, *arguments: object) -> None:
        """Call an NVML function. Raises NvmlError."""
        if os.getpid() != self._pid:
            raise NvmlError("NVML was opened before this process was forked", UNINITIALIZED)
        try:
            code = getattr(self._library, name)(*arguments)
        except AttributeError:
            raise NvmlError(
                f"the installed NVML has no function {name}; it needs a newer driver",
                FUNCTION_NOT_FOUND,
            ) from None
        if code:
            self._broken |= code in REOPEN
            raise NvmlError(f"{name}: {code}", code)


_OPENING = threading.Lock()  # held while a session is opened, so that two threads do not both open it


@functools.cache
def _session_of(path: str) -> _Session:
    return _Session(ctypes.CDLL(path))


class Cards:
    """The GPUs that an NVML library finds. Raises OSError if the library or its driver cannot be loaded."""

    def __init__(self, library: str) -> None:
        with _OPENING:
            self._session = _session_of(library)
            self._session.mend()

    def all(self) -> list[Card]:
        """All GPUs of this machine, in NVML's order."""
        count = ctypes.c_uint()
        self._session.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return [self._open(index) for index in range(count.value)]

    def _open(self, index: int) -> Card:
        handle = ctypes.c_void_p()
        self._session.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        text = ctypes.create_string_buffer(TEXT_BYTES)
        self._session.call("nvmlDeviceGetUUID", handle, text, ctypes.c_uint(TEXT_BYTES))
        return Card(self._session, handle, text.value.decode(), index)

    def release(self) -> str:
        """Release of the driver, such as 615.71.09."""
        text = ctypes.create_string_buffer(TEXT_BYTES)
        self._session.call("nvmlSystemGetDriverVersion", text, ctypes.c_uint(TEXT_BYTES))
        return text.value.decode(errors="replace")

    def card(self, uuid: str) -> Card:
        """The GPU with this UUID."""
        handle = ctypes.c_void_p()
        self._session.call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
        return Card(self._session, handle, uuid)


class Card:
    """One GPU, as NVML reports it. Methods raise OSError for values that the driver does not report."""

    def __init__(self, session: _Session, handle: ctypes.c_void_p, uuid: str, index: int = 0) -> None:
        self._session, self._handle = session, handle
        self.uuid, self.index = uuid, index

    def _call(self, name: str, *arguments: object) -> None:
        self._session.call(name, self._handle, *arguments)

    def _number(self, name: str, *arguments: object, kind: type = ctypes.c_uint) -> float:
        value = kind()
        self._call(name, *arguments, ctypes.byref(value))
        return float(value.value)

    def name(self) -> str:
        """Name of the GPU model."""
        text = ctypes.create_string_buffer(TEXT_BYTES)
        self._call("nvmlDeviceGetName", text, ctypes.c_uint(TEXT_BYTES))
        return text.value.decode(errors="replace")

    def memory(self) -> Memory:
        """Return the GPU's total and free memory."""
        found = (ctypes.c_uint64 * 3)()  # the structure has the fields total, free and used
        self._call("nvmlDeviceGetMemoryInfo", found)
        return Memory(int(found[0]), int(found[1]))

    def processes(self) -> list[int]:
        """Pids of the processes that have memory on the GPU, clients of MPS servers included."""
        found = self._running("nvmlDeviceGetComputeRunningProcesses_v3")
        try:  # NVML lists the clients of an MPS server in a call of its own
            found += self._running("nvmlDeviceGetMPSComputeRunningProcesses_v3")
        except NvmlError as error:
            if error.code not in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
                raise
        return list(dict.fromkeys(found))

    def _running(self, name: str) -> list[int]:
        room = LIKELY_PROCESSES
        while True:
            count, found = ctypes.c_uint(room), (_Process * room)()
            try:
                self._call(name, ctypes.byref(count), found)
            except NvmlError as error:
                if error.code != INSUFFICIENT_SIZE:
                    raise
                room = 2 * max(room, count.value)
            else:
                return [int(found[i].pid) for i in range(count.value)]

    def mig(self) -> bool:
        """Whether MIG mode is on."""
        now, pending = ctypes.c_uint(), ctypes.c_uint()
        try:
            self._call("nvmlDeviceGetMigMode", ctypes.byref(now), ctypes.byref(pending))
        except NvmlError:  # GPUs without MIG do not support this call
            return False
        return bool(now.value)

    def bus_id(self) -> str:
        """The GPU's PCI address, such as 00000000:02:00.0."""
        found = _Pci()
        self._call("nvmlDeviceGetPciInfo_v3", ctypes.byref(found))
        return str(found.bus_id.decode())

    def set_memory_limits(self, group: Path, soft_bytes: int, hard_bytes: int) -> None:
        """Limit a control group's memory on this GPU from now on. `soft_bytes` 0 and `hard_bytes` NO_LIMIT clear the
        limits. Raises NvmlError.
        """
        self._call("nvmlDeviceSetMemoryLimits_v1", ctypes.byref(_Limits(str(group).encode(), soft_bytes, hard_bytes)))

    def memory_limits(self, group: Path) -> MemoryLimits:
        """The limits of a control group, or of the nearest group above it that has limits. Raises NvmlError."""
        found = _Limits(str(group).encode())
        self._call("nvmlDeviceGetMemoryLimits_v1", ctypes.byref(found))
        return MemoryLimits(int(found.soft), int(found.hard), int(found.used))

    def compute_mode(self) -> str:
        """The GPU's compute mode in words, such as "exclusive process"; empty if MODES does not have the mode."""
        return MODES.get(int(self._number("nvmlDeviceGetComputeMode")), "")

    @functools.cached_property
    def highest_mhz(self) -> float:
        """The GPU's highest SM clock in MHz."""
        return self._number("nvmlDeviceGetMaxClockInfo", CLOCK_SM)

    def part(self) -> float:
        """Current SM clock as a fraction of the highest."""
        return self._number("nvmlDeviceGetClockInfo", CLOCK_SM) / max(1.0, self.highest_mhz)

    def read(self) -> dict[str, float]:
        """Read SM and memory clock in MHz, power in mW, and temperature in degrees Celsius. The result also has the
        keys of WHY, the reasons why the clock may be reduced: 1 if the reason holds now, otherwise 0. Values that
        cannot be read are left out.
        """
        found: dict[str, float] = {}
        for key, name, arguments in (
            ("sm_mhz", "nvmlDeviceGetClockInfo", (CLOCK_SM,)),
            ("memory_mhz", "nvmlDeviceGetClockInfo", (CLOCK_MEMORY,)),
            ("power_mw", "nvmlDeviceGetPowerUsage", ()),
            ("celsius", "nvmlDeviceGetTemperature", (TEMPERATURE_GPU,)),
        ):
            with suppress(OSError):
                found[key] = self._number(name, *arguments)
        with suppress(OSError):
            bits = int(self._number("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong))
            found |= {name: float(bool(bits & bit)) for name, bit in WHY.items()}
        return found
