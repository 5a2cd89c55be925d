"""A card's clock and power, by NVML's C library alone: an agent that runs from source has no binding for it."""

from __future__ import annotations

import ctypes
from contextlib import suppress

CLOCK_SM, CLOCK_MEMORY = 1, 2  # nvmlClockType_t
TEMPERATURE_GPU = 0
# nvmlClocksEventReasons: why the clock is not the highest
WHY = {"power_cap": 0x4, "thermal": 0x20 | 0x40, "slowdown": 0x8 | 0x80}


class CardClock:
    """One GPU. OSError where NVML or the GPU cannot be had (the software GPU)."""

    def __init__(self, uuid: str) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._device))
        self.highest_mhz = self._number("nvmlDeviceGetMaxClockInfo", CLOCK_SM)

    def _call(self, name: str, *arguments: object) -> None:
        try:
            code = getattr(self._library, name)(*arguments)
        except AttributeError:
            raise OSError(f"{name} is not in this NVML") from None
        if code:
            raise OSError(f"{name}: {code}")

    def _number(self, name: str, *arguments: object, kind: type = ctypes.c_uint) -> float:
        value = kind()
        self._call(name, self._device, *arguments, ctypes.byref(value))
        return float(value.value)

    def part(self) -> float:
        """The SM clock now, over the highest."""
        return self._number("nvmlDeviceGetClockInfo", CLOCK_SM) / max(1.0, self.highest_mhz)

    def read(self) -> dict[str, float]:
        """SM and memory clock in MHz, power in mW, degrees, and for each reason to hold the clock back 0 or 1; without
        what cannot be read."""
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


def card_clock(uuid: str) -> CardClock | None:
    """CardClock; None where there is none."""
    with suppress(OSError):
        return CardClock(uuid)
    return None
