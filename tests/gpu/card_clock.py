"""The card's clock and power while something runs, read through NVML; and whether the host was held back meanwhile."""

from __future__ import annotations

import ctypes
import statistics
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

EVERY_S = 0.05  # each look is a call of the driver
CLOCK_SM, CLOCK_MEMORY = 1, 2  # nvmlClockType_t
POWER_CAP, HARDWARE_SLOWDOWN, THERMAL, POWER_BRAKE = 0x4, 0x8, 0x20 | 0x40, 0x80  # nvmlClocksEventReasons
WHY = {"power_cap": POWER_CAP, "thermal": THERMAL, "slowdown": HARDWARE_SLOWDOWN | POWER_BRAKE}


class Nvml:
    """One GPU; readings that cannot be had are left out."""

    def __init__(self, uuid: str) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._device))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise OSError(f"{name}: {code}")

    def _number(self, name: str, *arguments: object, kind: type = ctypes.c_uint) -> float:
        value = kind()
        self._call(name, self._device, *arguments, ctypes.byref(value))
        return float(value.value)

    def read(self) -> dict[str, float]:
        """SM and memory clock in MHz, power in W, degrees, and for each reason to hold the clock back 0 or 1."""
        found: dict[str, float] = {}
        for key, name, arguments in (
            ("sm_mhz", "nvmlDeviceGetClockInfo", (CLOCK_SM,)),
            ("memory_mhz", "nvmlDeviceGetClockInfo", (CLOCK_MEMORY,)),
            ("power_mw", "nvmlDeviceGetPowerUsage", ()),
            ("celsius", "nvmlDeviceGetTemperature", (0,)),
        ):
            with suppress(OSError, AttributeError):
                found[key] = self._number(name, *arguments)
        with suppress(OSError, AttributeError):
            bits = int(self._number("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong))
            found |= {name: float(bool(bits & bit)) for name, bit in WHY.items()}
        return found


_nvml: dict[str, Nvml | None] = {}


def _card(uuid: str) -> Nvml | None:
    if uuid not in _nvml:
        _nvml[uuid] = None
        with suppress(OSError):
            _nvml[uuid] = Nvml(uuid)
    return _nvml[uuid]


class Watch:
    """Reads every EVERY_S while it is entered; nothing where there is no NVML."""

    def __init__(self, uuid: str) -> None:
        self._card = _card(uuid)
        self._seen: list[dict[str, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while self._card is not None and not self._stop.wait(EVERY_S):
            self._seen.append(self._card.read())

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def medians(self) -> dict[str, float]:
        """Median of each clock, power and temperature; of the reasons, the part of the looks that had them."""
        keys = dict.fromkeys(key for seen in self._seen for key in seen)
        values = {key: [seen[key] for seen in self._seen if key in seen] for key in keys}
        return {k: statistics.fmean(v) if k in WHY else statistics.median(v) for k, v in values.items()}


def throttled() -> int:
    """Microseconds for which this control group was held back by its share of the processors, so far; -1: not known."""
    for path in ("/sys/fs/cgroup/cpu.stat", "/sys/fs/cgroup/cpu/cpu.stat"):
        with suppress(OSError):
            for line in Path(path).read_text().splitlines():
                if line.startswith("throttled_usec"):
                    return int(line.split()[1])
                if line.startswith("throttled_time"):
                    return int(line.split()[1]) // 1000
    return -1
